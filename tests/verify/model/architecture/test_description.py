"""Sizes that cannot fit each other are no description: what computes with them checks no bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from outrider.verify.model.architecture.description import Architecture, Latent, Layer, Mixture, Recurrence, Rotary, State

ATTENTION = Layer(heads=4, kv_heads=2, head_dim=16, rotary=0)
DELTA = Recurrence(State.DELTA_RULE, 3, heads=4, key_heads=2, key_dim=8, value_dim=8)
MIXTURE = Mixture(12, 3, groups=4, used_groups=2)
ROTARY = Rotary(16, 1e4)
WHOLE = Architecture("x", 64, 97, (ATTENTION, replace(ATTENTION, source=0)), (ROTARY,), 512, 1e-6)


@pytest.mark.parametrize(
    ("fitting", "fields"),
    [
        *((MIXTURE, {"used": used}) for used in (0, 13, 7, -1, 2.0, None, "3", 2**40)),
        *((MIXTURE, {"groups": groups}) for groups in (5, 0, 12, -4)),
        *((MIXTURE, {"used_groups": used}) for used in (5, 0)),
        (MIXTURE, {"experts": 2**31}),
        *((ROTARY, {"size": size}) for size in (0, -2, 2**32 + 16)),
        *((DELTA, {"key_heads": heads}) for heads in (3, 0, 5, -2)),
        (DELTA, {"window": -1}),
        (Latent(8, 8, 8), {"rank": 0}),
        *((ATTENTION, {"kv_heads": heads}) for heads in (3, 0, 8, None)),
        *((ATTENTION, {"window": window}) for window in (0, -1, 2**31, 1.5)),
        (ATTENTION, {"heads": -4}),
        *((WHOLE, {"layers": layers}) for layers in ((), (replace(ATTENTION, rotary=None, source=0),))),
        (WHOLE, {"layers": (ATTENTION, replace(ATTENTION, source=2))}),
        (WHOLE, {"layers": (ATTENTION, replace(ATTENTION, head_dim=32, source=0))}),
        (WHOLE, {"layers": (replace(ATTENTION, head_dim=8),)}),
        (WHOLE, {"vocabulary": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fitting: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its sizes do not fit each other"):
        replace(fitting, **fields)


def test_a_table_of_angles_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError):
        replace(WHOLE, rotaries=())
