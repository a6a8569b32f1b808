"""Request fields and their effect on the output, which does not depend on drafting."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.requests import MESSAGES, PROMPT, body, complete, events, text
from tests.servers import Served


def ids(served: Served, content: str) -> list[int]:
    response = served.http.post("/tokenize", json={"prompt": content})
    assert response.status_code == 200
    found: list[int] = response.json()["tokens"]
    return found


SAMPLED: list[dict[str, Any]] = [
    {"presence_penalty": 1.5, "frequency_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"temperature": 1, "seed": 5, "frequency_penalty": 2},
    {"logit_bias": {"40": -100, "50": 3}},
    {"min_tokens": 35, "max_tokens": 40},
    {"temperature": 1, "seed": 8, "ignore_eos": True},
    {"temperature": 1, "seed": 8, "top_k": 5, "min_p": 0.1},
]


@pytest.mark.parametrize("fields", SAMPLED, ids=str)
def test_drafting_changes_nothing(served: Served, fields: dict[str, Any]) -> None:
    common = {"max_tokens": 60, "return_token_ids": True, **fields}
    plain = complete(served, **common, speculation={"drafter": "none"})
    drafted = complete(served, **common, speculation={"drafter": "fusion"})
    assert drafted["choices"] == plain["choices"]


@pytest.mark.parametrize(
    ("path", "prompt"), [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": MESSAGES})]
)
def test_the_trace_of_a_stream_has_the_tokens_of_its_answer(served: Served, path: str, prompt: dict[str, Any]) -> None:
    fields = {"model": served.model, "temperature": 1, "seed": 3, "max_tokens": 60, "return_token_ids": True, "stream": True}
    chunks = events(served, path, fields | prompt | {"speculation": {"trace": True, "report": True}})
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    traces = [choice["trace"] for choice in choices if "trace" in choice]
    accepted = [[trace["draft"]["tokens"][row] for row in trace["accepted"]] for trace in traces]
    bonus = [[trace["bonus"]["token"]] if trace["bonus"] else [] for trace in traces]
    traced = [token for pair in zip(accepted, bonus, strict=True) for tokens in pair for token in tokens]
    assert traced == [token for choice in choices for token in choice.get("token_ids", [])]
    report = chunks[-2]["speculation"]
    assert (len(traces), sum(map(len, accepted))) == (report["steps"], sum(report["accepted_tokens"].values()))
    assert sum(len(trace["draft"]["tokens"]) for trace in traces) == sum(report["drafted_tokens"].values()) > 0
    with pytest.raises(openai.BadRequestError, match=r"'speculation.trace' needs a stream"):
        served.client.completions.create(model=served.model, prompt="x", extra_body={"speculation": {"trace": True}})


def test_penalties_and_biases_change_the_answer(served: Served) -> None:
    full = complete(served, max_tokens=60, return_token_ids=True)
    assert text(complete(served, max_tokens=60, frequency_penalty=2)) != text(full)
    first = full["choices"][0]["token_ids"][0]
    banned = complete(served, max_tokens=5, return_token_ids=True, logit_bias={str(first): -100})
    assert first not in banned["choices"][0]["token_ids"]


def test_stop_tokens(served: Served) -> None:
    full = complete(served, max_tokens=40, return_token_ids=True)["choices"][0]["token_ids"]
    stop = next(token for place, token in enumerate(full) if place > 5 and token not in full[:place])
    cut = complete(served, max_tokens=40, return_token_ids=True, stop_token_ids=[stop])
    assert cut["choices"][0]["token_ids"] == full[: full.index(stop) + 1]
    assert cut["choices"][0]["finish_reason"] == "stop"
    with_stop = complete(served, max_tokens=40, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert text(with_stop).startswith(text(cut))
    assert len(text(with_stop)) > len(text(cut))


def test_a_stop_string_may_be_included(served: Served) -> None:
    full = text(complete(served, max_tokens=60))
    stop = full[20:24]
    with_stop = text(complete(served, max_tokens=60, stop=stop, include_stop_str_in_output=True))
    assert with_stop == full[: full.index(stop) + len(stop)]


def test_min_tokens_delays_stop_strings(served: Served) -> None:
    full = text(complete(served, max_tokens=60))
    stop = full[8:11]
    early = complete(served, max_tokens=60, stop=stop)
    assert text(early) == full[: full.index(stop)]
    later = complete(served, max_tokens=60, stop=stop, min_tokens=30)
    assert later["usage"]["completion_tokens"] >= 30
    assert full.startswith(text(later)[: len(full) // 4])


@pytest.mark.parametrize("temperature", [0, 1])
def test_logprobs_are_those_of_plain_decoding(served: Served, temperature: float) -> None:
    common: Any = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, "temperature": temperature, "seed": 4}
    scored: Any = {"logprobs": True, "top_logprobs": 3}
    create = served.client.chat.completions.create
    plain = create(**common, **scored, extra_body={"speculation": {"drafter": "none"}}).choices[0]
    drafted = create(**common, **scored, extra_body={"speculation": {"drafter": "fusion"}}).choices[0]
    assert plain.logprobs and drafted.logprobs and plain.logprobs.content and drafted.logprobs.content
    assert len(plain.logprobs.content) == len(drafted.logprobs.content)
    for one, other in zip(plain.logprobs.content, drafted.logprobs.content, strict=True):
        assert one.token == other.token
        assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
        assert [top.token for top in one.top_logprobs] == [top.token for top in other.top_logprobs]
        assert [top.logprob for top in other.top_logprobs] == pytest.approx([t.logprob for t in one.top_logprobs], abs=1e-4)
    assert "".join(bytes(entry.bytes or []).decode() for entry in drafted.logprobs.content) == drafted.message.content
    chunks = list(create(**common, **scored, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert [entry.token for entry in streamed] == [entry.token for entry in drafted.logprobs.content]


def test_completion_logprobs(served: Served) -> None:
    choice = complete(served, logprobs=2, max_tokens=10)["choices"][0]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert all(2 <= len(top) <= 3 for top in found["top_logprobs"])
    assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(found["tokens"]))]
    assert complete(served, max_tokens=10)["choices"][0]["logprobs"] is None


def test_an_exact_prediction_is_followed(served: Served) -> None:
    common: dict[str, Any] = {"model": served.model, "messages": MESSAGES, "max_tokens": 200, "temperature": 1, "seed": 9}
    plain = served.http.post("/v1/chat/completions", json=common).json()
    answer = plain["choices"][0]["message"]["content"]
    predicted = common | {"prediction": {"type": "content", "content": answer}, "speculation": {"report": True}}
    for drafter in ("prediction", "fusion"):
        drafted = served.http.post(
            "/v1/chat/completions", json=predicted | {"speculation": {"drafter": drafter, "report": True}}
        ).json()
        assert drafted["choices"] == plain["choices"]
        assert drafted["speculation"]["mean_tokens_per_step"] >= 6
    details = drafted["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0


def test_echo_and_best_of(served: Served) -> None:
    echoed = complete(served, prompt=[PROMPT, "x = "], echo=True, max_tokens=5)
    assert [choice["text"].startswith(p) for choice, p in zip(echoed["choices"], (PROMPT, "x = "), strict=True)] == [True, True]
    stream = events(served, "/v1/completions", body(served, echo=True, max_tokens=5, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == echoed["choices"][0]["text"]
    many = complete(served, temperature=1.2, seed=3, n=4, logprobs=0, max_tokens=12)["choices"]
    best = complete(served, temperature=1.2, seed=3, n=2, best_of=4, max_tokens=12)["choices"]
    ranked = sorted(many, key=lambda c: -sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["token_logprobs"]))
    assert [choice["text"] for choice in best] == [choice["text"] for choice in ranked[:2]]
    assert [choice["index"] for choice in best] == [0, 1]
    assert best[0]["logprobs"] is None


def test_prompt_logprobs_equal_those_of_generation(served: Served) -> None:
    prompt = ids(served, PROMPT)
    answer = complete(served, prompt=prompt, logprobs=2, max_tokens=90, return_token_ids=True)["choices"][0]
    scored = body(served, prompt=prompt + answer["token_ids"], echo=True, logprobs=2)
    full = complete(served, **scored | {"max_tokens": 0})["choices"][0]
    assert (full["text"], full["finish_reason"]) == (PROMPT + answer["text"], "length")
    found, before = full["logprobs"], answer["logprobs"]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    assert "".join(found["tokens"]) == full["text"]
    tail = found["token_logprobs"][len(prompt) :]
    assert tail == pytest.approx(before["token_logprobs"], abs=1e-4)
    assert [top.keys() for top in found["top_logprobs"][len(prompt) :]] == [top.keys() for top in before["top_logprobs"]]
    chunks = events(served, "/v1/completions", scored | {"max_tokens": 7, "stream": True, "return_token_ids": True})
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    streamed = [logprob for part in parts if part for logprob in part["token_logprobs"]]
    assert len(streamed) == len(found["token_logprobs"]) + 7
    assert sum(len(chunk["choices"][0].get("token_ids", ())) for chunk in chunks[:-1]) == 7


def test_max_tokens_zero_generates_no_tokens(served: Served) -> None:
    answer = complete(served, max_tokens=0, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["", ""]
    assert answer["usage"]["completion_tokens"] == 0


def test_tokenize_and_detokenize(served: Served) -> None:
    tokens = ids(served, PROMPT)
    assert served.http.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": PROMPT}
    chat = served.http.post("/tokenize", json={"messages": MESSAGES}).json()
    usage = served.client.chat.completions.create(model=served.model, messages=MESSAGES, max_tokens=1).usage
    assert usage and chat["count"] == usage.prompt_tokens == len(chat["tokens"])


def test_the_final_message_may_be_continued(served: Served) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "def read"}]
    opened = served.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    fields = {"model": served.model, "messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    response = served.http.post("/v1/chat/completions", json=fields | {"max_tokens": 8, "temperature": 0})
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["prompt_tokens"] == len(opened) + len(ids(served, "def read"))


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"functions": [{"name": "f"}]}, "functions", "not supported"),
    ({"tool_choice": "required"}, None, "needs 'tools'"),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools.0.function.name", "pattern"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "is required with type"),
    ({"regex": "(a"}, "regex", "regex"),
    ({"regex": "a", "choice": ["b"]}, "regex", "only one of"),
    ({"choice": []}, "choice", "at least 1 item"),
    ({"regex": "a" * 70_000}, "regex", "larger than 65536 bytes"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio", "not supported"),
    ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"store": True}, "store", "not supported"),
    ({"web_search_options": {}}, "web_search_options", "not supported"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias", "from 0 to"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "numbers from -100 to 100"),
    ({"top_logprobs": 3}, "top_logprobs", "needs 'logprobs'"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"prediction": {"type": "text", "content": "x"}}, "prediction.type", "content"),
    ({"stop_token_ids": [99999999]}, "stop_token_ids", "from 0 to"),
    ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "may contain"),
    ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message", "assistant"),
]


@pytest.mark.parametrize(("fields", "param", "words"), BAD)
def test_unsupported_fields_are_named(served: Served, fields: dict[str, Any], param: str | None, words: str) -> None:
    common = {"model": served.model, "messages": MESSAGES, "max_tokens": 3}
    response = served.http.post("/v1/chat/completions", json=common | fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_harmless_fields_are_accepted(served: Served) -> None:
    harmless: Any = {"user": "u", "metadata": {"a": "b"}, "service_tier": "auto", "store": False, "parallel_tool_calls": True}
    answer = served.client.chat.completions.create(model=served.model, messages=MESSAGES, max_tokens=2, **harmless)
    assert answer.choices[0].message.content is not None
    with pytest.raises(openai.BadRequestError, match="no fill-in-the-middle tokens"):
        served.client.completions.create(model=served.model, prompt="x", suffix="y")


def test_headers(served: Served) -> None:
    for given, with_stop in (("my-id.1", True), ("bad id\u00e9", False), ("x" * 200, False)):
        answer = served.http.get("/v1/models", headers=[(b"x-request-id", given.encode("latin-1"))])
        assert (answer.headers["x-request-id"] == given) == with_stop
        assert int(answer.headers["openai-processing-ms"]) >= 0
    assert served.client.chat.completions.create(model=served.model, messages=MESSAGES, max_tokens=1)._request_id


def test_obfuscation_hides_chunk_sizes(served: Served) -> None:
    fields = body(served, stream=True, max_tokens=60, temperature=1, seed=2)
    with served.http.stream(
        "POST", "/v1/completions", json=fields | {"stream_options": {"include_obfuscation": True}}
    ) as reply:
        lines = [line for line in reply.iter_lines() if line.startswith("data: {")]
    assert {len(line.removeprefix("data: ").encode()) % 256 for line in lines} == {0}
    plain = events(served, "/v1/completions", fields)
    shown = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines]
    assert "".join(shown) == "".join(chunk["choices"][0]["text"] for chunk in plain[:-1])
    assert all("obfuscation" not in chunk for chunk in plain[:-1])
