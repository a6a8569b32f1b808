"""The body of /infill: llama-server's names, defaults and unsupported fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.chat.fill_in import ContextFile, FillInText
from outrider.server.llama.schema import UNSUPPORTED, InfillBody


def body(**fields: Any) -> InfillBody:
    return InfillBody.model_validate({"input_prefix": "a", "input_suffix": "b", **fields})


def test_the_texts() -> None:
    assert body().text == FillInText("a", "b")
    files = [{"filename": "x.py", "text": "x"}, {"text": "y"}]
    given = body(prompt="c", input_extra=files).text
    assert given == FillInText("ac", "b", (ContextFile("x.py", "x"), ContextFile("tmp", "y")))


def test_sampling_has_the_defaults_of_llama_server() -> None:
    params = body().sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.8, 40, 0.95, 0.05)
    assert params.repetition_penalty == 1.0
    given = body(temperature=0, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.5, seed=7).sampling_params()
    assert (given.temperature, given.top_k, given.repetition_penalty, given.seed) == (0.0, 0, 1.5, 7)


@pytest.mark.parametrize("seed", [-1, 4294967295])
def test_the_default_seed_is_random(seed: int) -> None:
    assert body(seed=seed).sampling_params().seed != body(seed=seed).sampling_params().seed


@pytest.mark.parametrize(
    ("fields", "limit"),
    [({}, None), ({"n_predict": -1}, None), ({"n_predict": 0}, 0), ({"n_predict": 5}, 5), ({"max_tokens": 6}, 6)],
)
def test_the_token_limit(fields: dict[str, Any], limit: int | None) -> None:
    assert body(**fields).token_limit == limit


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_are_named(name: str) -> None:
    for harmless in UNSUPPORTED[name]:
        assert body(**{name: harmless})
    with pytest.raises(ValidationError, match=f"'{name}' is not supported"):
        body(**{name: 0.25})


def test_what_editors_send_is_accepted() -> None:
    fields = {"samplers": ["top_k", "top_p", "infill"], "n_indent": 4, "t_max_prompt_ms": 500, "t_max_predict_ms": 1000}
    given = body(**fields, cache_prompt=True, stop=[], stream=False, samplers_order=1)
    params = given.sampling_params()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 40, 0.95, 0.2)
    assert given.new_stop().feed("a\nb") == (2, "length")
    with pytest.raises(ValidationError):
        InfillBody.model_validate({"input_prefix": "a"})
