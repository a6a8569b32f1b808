"""The body of /infill: llama-server's names, defaults and unsupported fields."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider.server.llama.schema import UNSUPPORTED, InfillBody


def body(**fields: Any) -> InfillBody:
    return InfillBody.model_validate({"input_prefix": "a", "input_suffix": "b", **fields})


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
