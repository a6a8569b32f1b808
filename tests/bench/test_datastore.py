"""Steps of drafters over a datastore, and the tables in 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.datastore import DRAFTERS, FIGURES, STRIDE, make_drafters, resident_mb, run, show, step_seconds
from bench.plan import PROMPTS, BenchError
from outrider.drafters.tables.suffix import index
from outrider.models import TARGET


@pytest.mark.parametrize("number", range(len(DRAFTERS)))
def test_a_text_is_read_in_strides(number: int) -> None:
    text = np.array([5, 6, 7, 8] * 10, np.int32)
    drafter = make_drafters([index(text.astype(np.int64), 98)], 98)[number]
    times, peak_mb = step_seconds(drafter, [text, text])
    assert len(times) == 2 * (len(text) // STRIDE - 2)
    assert min(times) > 0
    assert 0 < peak_mb <= 1.5 * resident_mb()


def test_missing_texts_are_reported() -> None:
    with pytest.raises(BenchError, match="Building the datastore failed"):
        run([Path("/no/such/text")], str(TARGET), PROMPTS, 1, None)


def test_tables_fit_80_columns(printed: Callable[[], str]) -> None:
    figures: dict[str, Any] = dict.fromkeys(FIGURES, 12345678901)
    quantiles = {"p50": 123456.7, "p99": 1234567.8}
    growth = {"resident_growth_mb": 123456.7, "resident_growth_while_answering_mb": -12345.6}
    figures |= {name: {"questions": 1234567, "propose_and_observe_us": quantiles, **growth} for name in DRAFTERS}
    show(figures)
    text = printed()
    assert text.count("12345678901") == len(FIGURES)
    assert text.count("-12345.6") == text.count("1234567.8") == 2
