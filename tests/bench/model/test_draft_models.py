"""Methods that draft with a model: their figures, and their tables in 80 columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.model.draft_models import METHODS, Row, run, run_shapes, show, speed_ratio_note, without
from bench.plan import BenchError, Plan
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources
from outrider.server.settings import Settings

BUSY = {"draft_busy": 0.25, "verify_busy": 0.5, "both_busy": 0.125}


def test_figures_are_relative_to_plain_decoding() -> None:
    plain = Row(tokens_per_second=[10.0, 20.0], last=[[1], [2]])
    row = Row(
        tokens_per_second=[20.0, 30.0],
        tokens=40,
        steps=10,
        accepted=30,
        merged_steps=1,
        merged_tokens=3,
        drafted=100,
        answers=4,
        busy=[BUSY, BUSY],
        last=[[1], [3]],
    )
    figures = row.figures(plain)
    assert figures["speedup"] == 1.75  # the median of 2 and 1.5
    assert (figures["tokens_per_step"], figures["acceptance"], figures["drafted_tokens"]) == (4.0, 0.75, 25.0)
    assert (figures["graph_success"], figures["merged_share"], figures["same_as_plain"]) == (0.1, 0.1, "1/2")
    assert figures["both_busy"] == 0.125


def test_an_option_is_switched_off_in_a_copy() -> None:
    resources = Resources(Options())
    assert not without(pre_verify=False)(resources).options.pearl.pre_verify
    assert resources.options.pearl.pre_verify


def test_a_draft_model_is_required(exact: Settings) -> None:
    plan = Plan(["none"], ["x"], [0.0], 8, 1)
    with pytest.raises(BenchError, match="--draft-model"):
        run(exact, plan, None)
    with pytest.raises(BenchError, match="no shape 'huge'"):
        run_shapes(exact, plan, ("llama-1b", "huge"), 0.8, None)


def test_a_draft_model_as_slow_as_the_target_is_pointed_out() -> None:
    assert "Choose a smaller draft model" in speed_ratio_note(1.02)
    assert speed_ratio_note(3.0) == "The draft model is 3.00 times as fast as the target."


def test_tables_fit_80_columns_and_name_every_method(printed: Callable[[], str]) -> None:
    figures = dict.fromkeys(("speedup", "acceptance", "tokens_per_step", "graph_success", "merged_share"), 123.456)
    rest = {"tokens_per_second": 123456.78, "drafted_tokens": 12345.6, "same_as_plain": "1319/1319", **BUSY}
    show([{"temperature": t, "method": method.name, **figures, **rest} for t in (0.0, 0.8) for method in METHODS])
    text = printed()
    assert all(text.count(f"{method.name}  ") >= 4 for method in METHODS)
    assert all(cell in text for cell in ("123456.78", "12345.6", "1319/1319", "temperature 0.8"))
