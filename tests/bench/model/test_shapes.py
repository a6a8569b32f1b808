"""Known shapes, without their weights."""

from __future__ import annotations

import pytest

from bench.model.shapes import SHAPES, check_shape
from bench.plan import BenchError


@pytest.mark.parametrize("name", SHAPES)
def test_heads_are_shared_evenly(name: str) -> None:
    shape = SHAPES[name]()
    assert shape.num_hidden_layers > 1
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    check_shape(name)


def test_an_unknown_shape_is_reported() -> None:
    with pytest.raises(BenchError, match="no shape 'huge'; choose from "):
        check_shape("huge")
