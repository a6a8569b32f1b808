"""The body of /infill and its answers: llama-server's names, formats and limits."""

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.drafters.sequence import Finish
from outrider.server.engine.messages import Request
from outrider.server.llama.endpoint import InfillFormatter
from outrider.server.llama.schema import InfillBody, LineLimits
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.usage import Usage
from outrider.verify.sampling_params import SamplingParams

EOS = 9
USAGE = Usage(prompt_tokens=5, cached_tokens=3, completion_tokens=2)


def formatter(**fields: Any) -> InfillFormatter:
    body = InfillBody.model_validate({"model": "m", "input_prefix": "a", "input_suffix": "b", **fields})
    request = Request(id="r-0", prompt=[1, 2, 3, 4, 5], params=SamplingParams(), max_tokens=8)
    return InfillFormatter(body, request, arrived=0.0, stats={"first_token_ms": 12.0}, eos_ids={EOS})


def output(*tokens: int, text: str = "x\n", finish: Finish | None = "stop") -> ChoiceOutput:
    return ChoiceOutput(0, finish, list(tokens), pieces=[(text, len(tokens))])


def test_a_complete_answer() -> None:
    answer = formatter(id_slot=2).body([output(7, EOS)], USAGE)
    timings = answer.pop("timings")
    counts = {"tokens_predicted": 2, "tokens_evaluated": 5, "tokens_cached": 7, "tokens": []}
    end = {"stop": True, "stop_type": "eos", "stopping_word": "", "has_new_line": True, "truncated": False}
    assert answer == {"index": 0, "content": "x\n", "id_slot": 2, "model": "m", **counts, **end}
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"], timings["prompt_ms"]) == (3, 2, 2, 12.0)
    assert formatter(return_tokens=True).body([output(7, EOS)], USAGE)["tokens"] == [7, EOS]


@pytest.mark.parametrize(
    ("given", "stop", "expected"),
    [
        (output(7, EOS), ["z"], "eos"),
        (output(7), ["z"], "word"),
        (output(7), [], "eos"),  # a token that ends answers, but is not among the known ones
        (output(7, finish="length"), ["z"], "limit"),
    ],
)
def test_why_the_answer_ends(given: ChoiceOutput, stop: list[str], expected: str) -> None:
    assert formatter(stop=stop).body([given], USAGE)["stop_type"] == expected


def test_selected_fields_keep_their_paths() -> None:
    fields = ["content", "timings/prompt_n", "timings/unknown", "nothing", ""]
    assert formatter(response_fields=fields).body([output(7)], USAGE) == {"content": "x\n", "timings/prompt_n": 2}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n    b\n\t\t\t\tc", None),
        ("a\nb", "a\n"),  # the first line has any indentation
        ("a\n  b", "a\n  "),
        ("    a\n    b\n\n    c", "    a\n    b\n"),  # an empty line has none
        ("a\n      ", None),
    ],
)
def test_the_indentation(text: str, expected: str | None, size: int) -> None:
    limits, kept = LineLimits(4, 0), ""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        if cut := limits.feed(piece):
            assert cut.finish == "length" and kept + piece[: cut.characters] == expected
            return
        kept += piece
    assert expected is None


def test_after_its_time_an_answer_ends_with_the_line() -> None:
    clock = Clock()
    limits = LineLimits(0, 0.5, clock)
    assert limits.feed("a\nb\n") is None  # the time begins with the first text
    clock.now += 0.4
    assert limits.feed("c\nd") is None
    clock.now += 0.2
    assert limits.feed("e") is None
    assert limits.feed("f\ng\n") == (2, "length")


def body(**fields: Any) -> InfillBody:
    return InfillBody.model_validate({"input_prefix": "a", "input_suffix": "b", **fields})


def test_what_editors_send_is_accepted() -> None:
    fields = {"samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    given = body(**fields, cache_prompt=True, stop=[], stream=False, samplers_order=1)
    params = given.sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 40, 0.95, 0.2)
    assert given.new_stop().feed("a\nb") == (2, "length")
    with pytest.raises(ValidationError):
        InfillBody.model_validate({"input_prefix": "a"})
