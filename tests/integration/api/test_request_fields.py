"""Request fields and their effect on the output, which does not depend on drafting."""

import re
from typing import Any

import pytest

from tests.requests import MESSAGES, PROMPT, body, complete, events, text
from tests.servers import Served, read_metrics
from tests.slow import mostly_slow

SAMPLED: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"repetition_penalty": 1.5}]
SAMPLED += [{"presence_penalty": 1.5, "frequency_penalty": 1.0}, {"temperature": 1, "seed": 5, "frequency_penalty": 2}]
SAMPLED += [
    {"temperature": 0.7, "top_p": 0.8, "seed": 9},
    {"logit_bias": {"40": -100, "50": 3}},
    {"min_tokens": 35, "max_tokens": 40},
]
SAMPLED += [{"temperature": 1, "seed": 8, "ignore_eos": True}, {"temperature": 1, "seed": 8, "top_k": 5, "min_p": 0.1}]


@pytest.mark.parametrize("fields", mostly_slow(SAMPLED, *SAMPLED[::2]), ids=str)
def test_drafting_changes_only_the_number_of_steps(served: Served, fields: dict[str, Any]) -> None:
    common = {"max_tokens": 80, "return_token_ids": True, **fields}
    plain = complete(served, **common, speculation={"drafter": "none", "report": True})
    assert plain["speculation"]["mean_tokens_per_step"] == 1
    drafted = complete(served, **common, speculation={"drafter": "fusion", "report": True})
    assert (drafted["choices"], drafted["usage"]) == (plain["choices"], plain["usage"])
    assert drafted["speculation"]["steps"] < plain["speculation"]["steps"]


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 100}),
        ("/v1/responses", {"input": MESSAGES[0]["content"], "max_output_tokens": 100}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 100}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 100}),
    ],
)
def test_a_prediction_is_followed_in_every_api(served: Served, path: str, given: dict[str, Any]) -> None:
    def ask(**fields: Any) -> tuple[str, float]:
        """The answer, and the accepted tokens of predictions."""
        before = accepted(served)
        answer = served.http.post(path, json={"model": served.model, "temperature": 0, **given, **fields}).json()
        parts = answer["output"][0]["content"] if "output" in answer else answer.get("content") or answer["choices"]
        return "".join(part.get("message", {}).get("content") or part["text"] for part in parts), accepted(served) - before

    plain, none = ask()
    predicted, some = ask(prediction={"type": "content", "content": plain})
    assert predicted == plain and none == 0 and some > 8


def accepted(served: Served) -> float:
    """The accepted tokens of predictions so far."""
    found = re.search(r'outrider_accepted_tokens_total\{drafter="prediction"\} (\S+)', read_metrics(served))
    return float(found[1]) if found else 0.0


def test_prompt_logprobs_equal_those_of_generation(served: Served) -> None:
    prompt = served.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
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


def test_stop_strings_are_cut_exactly(served: Served) -> None:
    full = text(complete(served, max_tokens=80))
    stop = full[25:28]
    expected = full[: full.index(stop)]
    for drafter in ("none", "trigram"):
        answer = complete(served, max_tokens=80, stop=["never there", stop], speculation={"drafter": drafter})
        assert text(answer) == expected
        assert answer["choices"][0]["finish_reason"] == "stop"
    stream = events(served, "/v1/completions", body(served, max_tokens=80, stop=stop, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in stream[:-1]) == expected
