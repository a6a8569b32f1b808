"""Tables in 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.peers.tables import show

ROW: dict[str, Any] = {"shape": "llama-460m", "bits": 16, "method": "fusion", "peer": "outrider", "tokens_per_second": 12345.67}
RATIOS = {"over_plain": 123.456, "over_best_peer": 123.456}
FIGURES: dict[str, Any] = {
    "threads": 128,
    "not_installed": {"llama.cpp": "pip install gguf llama-cpp-python"},
    "steps": [{"shape": "llama-460m", "bits": 4, "peer": "outrider", "rows_1_ms": 1234.5, "rows_8_ms": 2.0, "rows_16_ms": 3.0}],
    "replay": [{**ROW, **RATIOS, "tokens_per_step": 12.345}, {**ROW, "peer": "llama.cpp", "method": "plain"}],
}


def test_tables_fit_80_columns(printed: Callable[[], str]) -> None:
    show(FIGURES)
    text = printed()
    assert "llama-460m: forced replay, 128 threads" in text and "llama-460m: milliseconds" in text
    assert all(cell in text for cell in ("123.46", "12.35", "1234.5", "12345.7"))
    assert "llama.cpp is not installed: pip install gguf llama-cpp-python" in text


def test_steps_alone_have_no_table_of_answers(printed: Callable[[], str]) -> None:
    show(FIGURES | {"replay": []})
    assert "forced replay" not in printed()
