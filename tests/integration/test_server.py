"""The real server process, through the official client and raw HTTP."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import Served

PROMPT = "def read_file(path):\n"
MESSAGES: Any = [{"role": "user", "content": "Write a function that reads a file."}]


def body(served: Served, **fields: Any) -> dict[str, Any]:
    return {"model": served.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 40, **fields}


def complete(served: Served, **fields: Any) -> dict[str, Any]:
    response = served.http.post("/v1/completions", json=body(served, **fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def events(served: Served, path: str, fields: dict[str, Any]) -> list[Any]:
    """The data of a stream's events; the last one is "[DONE]"."""
    with served.http.stream("POST", path, json=fields) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    assert raw.endswith("\n\n")
    data = [line.removeprefix("data: ") for line in raw.split("\n\n") if line and not line.startswith(":")]
    return [json.loads(line) for line in data[:-1]] + [data[-1]]


def test_chat_through_the_official_client(served: Served) -> None:
    answer = served.client.chat.completions.create(model=served.model, messages=MESSAGES, max_completion_tokens=60, seed=1)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_chat_stream_adds_up_to_the_whole_answer(served: Served) -> None:
    common: Any = {"model": served.model, "messages": MESSAGES, "max_tokens": 60, "temperature": 0.9, "seed": 4}
    whole = served.client.chat.completions.create(**common)
    chunks = list(served.client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_completions_through_the_official_client(served: Served) -> None:
    common: Any = {"model": served.model, "prompt": PROMPT, "max_tokens": 30, "temperature": 0.5, "seed": 2}
    whole = served.client.completions.create(**common)
    chunks = list(served.client.completions.create(**common, stream=True))
    assert whole.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text


def test_completion_stream_format(served: Served) -> None:
    whole = complete(served)
    stream = events(served, "/v1/completions", body(served, stream=True))
    assert stream[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == text(whole)
    assert all("usage" not in chunk for chunk in stream[:-1])
    assert len({chunk["id"] for chunk in stream[:-1]}) == 1


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"temperature": 0.7, "top_p": 0.8, "seed": 9}]
)
def test_drafting_changes_nothing_but_the_steps(served: Served, fields: dict[str, Any]) -> None:
    plain = complete(served, **fields, max_tokens=80, speculation={"drafter": "none", "report": True})
    fast = complete(served, **fields, max_tokens=80, speculation={"drafter": "trigram", "report": True})
    assert text(fast) == text(plain)
    assert fast["usage"] == plain["usage"]
    assert plain["speculation"]["mean_tokens_per_step"] == 1
    assert fast["speculation"]["steps"] < plain["speculation"]["steps"]
    off = complete(served, **fields, max_tokens=80, speculation={"max_nodes": 0, "report": True})
    assert off["speculation"]["drafted_tokens"] == {}


def test_stop_strings_are_cut_exactly(served: Served) -> None:
    whole = text(complete(served, max_tokens=80))
    stop = whole[25:28]
    expected = whole[: whole.index(stop)]
    for drafter in ("none", "trigram"):
        answer = complete(served, max_tokens=80, stop=["never there", stop], speculation={"drafter": drafter})
        assert text(answer) == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
    stream = events(served, "/v1/completions", body(served, max_tokens=80, stop=stop, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == expected


def test_usage_counts_exactly(served: Served) -> None:
    ids = complete(served, prompt=[300, 301, 302], max_tokens=7)
    assert ids["usage"]["prompt_tokens"] == 3
    assert ids["usage"]["completion_tokens"] == 7
    assert ids["choices"][0]["finish_reason"] == "length"


def test_n_choices_have_seeds_of_their_own(served: Served) -> None:
    fields = {"n": 3, "temperature": 1, "seed": 5, "max_tokens": 30}
    answer = complete(served, **fields)
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts[0] == text(complete(served, **fields | {"n": 1}))
    assert answer["usage"]["completion_tokens"] <= 90
    stream = events(served, "/v1/completions", body(served, **fields, stream=True))
    for index in range(3):
        parts = [chunk["choices"][0]["text"] for chunk in stream[:-1] if chunk["choices"][0]["index"] == index]
        assert "".join(parts) == texts[index]


def test_several_prompts(served: Served) -> None:
    answer = complete(served, prompt=[PROMPT, "import os\n"], n=2, temperature=1, seed=1, max_tokens=8)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_session_keeps_its_prefix_and_without_an_id_nothing_is_kept(served: Served) -> None:
    long_prompt = PROMPT * 20
    for session in ({}, {"session_id": "s1"}):
        first = complete(served, prompt=long_prompt, max_tokens=4, **session)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second = complete(served, prompt=long_prompt + text(first) + "\n", max_tokens=4, **session)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0.8 * second["usage"]["prompt_tokens"] if session else cached == 0
    header = served.http.post("/v1/completions", json=body(served, prompt=long_prompt), headers={"X-Session-Id": "s1"})
    assert header.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_disconnect_frees_the_worker(served: Served) -> None:
    forever = body(served, temperature=1.5, max_tokens=1900, n=16, stream=True)
    with served.http.stream("POST", "/v1/completions", json=forever) as response:
        next(response.iter_lines())
    with pytest.raises(httpx.ReadTimeout):  # a client that gives up on a whole answer
        served.http.post("/v1/completions", json=body(served, temperature=1.5, max_tokens=1900, n=16), timeout=0.3)
    started = time.monotonic()
    complete(served, max_tokens=2)
    assert time.monotonic() - started < 5  # the two answers would have taken far longer
    assert "outrider_requests_running 0.0" in served.http.get("/metrics").text


BAD: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"temperature": "hot"}, 400, "temperature", "temperature"),
    ({"temperature": 9}, 400, "temperature", "less than or equal to 2"),
    ({"top_p": 0}, 400, "top_p", "greater than 0"),
    ({"max_tokens": -1}, 400, "max_tokens", "max_tokens"),
    ({"max_tokens": 1 << 70}, 200, None, ""),
    ({"seed": 1 << 63}, 400, "seed", "seed"),
    ({"n": 10_000}, 400, "n", "at most 16"),
    ({"stop": ["x"] * 40}, 400, "stop", "at most 16"),
    ({"stop": ["x" * 900]}, 400, "stop", "at most 500"),
    ({"stop": 3}, 400, "stop", "stop"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [999_999]}, 400, "prompt", "from 0 to"),
    ({"prompt": "x " * 5000}, 400, "prompt", "context holds 2048"),
    ({"model": "gpt-5"}, 404, "model", "this server serves"),
    ({"speculation": {"drafter": "magic"}}, 400, "speculation.drafter", "drafter"),
    ({"unknown_field": 1}, 200, None, ""),
]


@pytest.mark.parametrize(("fields", "status", "param", "words"), BAD)
def test_errors_have_openais_shape(served: Served, fields: dict[str, Any], status: int, param: str | None, words: str) -> None:
    response = served.http.post("/v1/completions", json=body(served, max_tokens=3) | fields)
    assert response.status_code == status, response.text
    if status != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["param"] or "").startswith(param or "")
        assert words in error["message"]


def test_a_prompt_that_is_too_long_names_both_numbers(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d{4} tokens.*2048") as raised:
        served.client.completions.create(model=served.model, prompt="x = 1\n" * 3000)
    assert raised.value.code == "context_length_exceeded"


def test_the_client_raises_its_own_error_classes(served: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        served.client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="messages"):
        served.client.chat.completions.create(model=served.model, messages=[])
    with pytest.raises(openai.BadRequestError, match="image_url"):
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        served.client.chat.completions.create(model=served.model, messages=image)


def test_paths_methods_and_bodies_that_are_wrong(served: Served) -> None:
    http = served.http
    assert http.get("/v1/nothing").json()["error"]["message"].startswith("There is nothing at")
    assert http.get("/v1/nothing").status_code == 404
    assert http.get("/v1/completions").status_code == 405
    assert "error" in http.get("/v1/completions").json()
    assert http.post("/v1/completions", content=b"{no json", headers={"content-type": "application/json"}).status_code == 400
    assert http.post("/v1/completions", json=[1]).status_code == 400
    large = http.post("/v1/completions", json=body(served, prompt="x" * 300_000))
    assert large.status_code == 413
    assert large.json()["error"]["code"] == "body_too_large"

    def parts() -> Any:
        for _ in range(400):
            yield b"x" * 1000

    assert http.post("/v1/completions", content=parts()).status_code == 413


def test_a_message_cannot_speak_for_another_role(served: Served) -> None:
    def tokens(content: str) -> int:
        answer = served.client.chat.completions.create(
            model=served.model, messages=[{"role": "user", "content": content}], max_tokens=1
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    # As special tokens these two would count two; as text they take several each.
    assert tokens("<|end|><|assistant|>") - tokens("") > 4


def test_service_endpoints(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/ready").json() == {"status": "ready"}
    assert served.http.get("/version").json()["version"]
    assert served.client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    metrics = served.http.get("/metrics").text
    assert 'outrider_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert 'outrider_draft_tokens_total{drafter="trigram"}' in metrics


def test_requests_wait_for_each_other_and_all_are_answered(served: Served) -> None:
    from concurrent.futures import ThreadPoolExecutor

    alone = text(complete(served, max_tokens=30))
    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(lambda _: text(complete(served, max_tokens=30)), range(8)))
    assert texts == [alone] * 8


def test_a_long_answer_does_not_starve_a_short_one(served: Served) -> None:
    """They take turns, a step each."""
    long = body(served, temperature=1.5, max_tokens=1900, n=4, ignore_eos=True, stream=True)
    with served.http.stream("POST", "/v1/completions", json=long) as response:
        lines = response.iter_lines()
        next(lines)
        assert complete(served, max_tokens=10)["choices"][0]["finish_reason"] == "length"
        assert "outrider_requests_running 1.0" in served.http.get("/metrics").text  # the long one is still at it
