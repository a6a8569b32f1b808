"""Tables in 80 columns, and the plot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.tables import draw, panels, show

ROW: dict[str, Any] = {"bits": 16, "method": "assistant", "peer": "transformers", "tokens_per_second": 12345.67}
RATIOS = {"over_llama_plain": 123.456, "over_llama_lookup": 123.456}
FIGURES: dict[str, Any] = {
    "threads": 128,
    "not_installed": {"llama.cpp-http": "pip install gguf 'llama-cpp-python[server]'"},
    "answers": [
        {
            **ROW,
            **RATIOS,
            "temperature": 0.8,
            "transport": "in process",
            "tokens_per_step": 12.345,
            "same_tokens_as_first": "164/164",
        },
        {**ROW, "temperature": 0.8, "transport": "in process", "method": "plain", "same_tokens_as_first": "0/164"},
        {**ROW, **RATIOS, "temperature": 0.8, "transport": "HTTP", "bits": 8},
    ],
    "steps": [{"shape": "llama-460m", "bits": 4, "peer": "outrider", "rows_1_ms": 1234.5, "rows_8_ms": 2.0, "rows_16_ms": 3.0}],
    "replay": [{**ROW, **RATIOS, "shape": "llama-460m", "transport": "in process", "tokens_per_step": 2.5}],
}


def test_tables_fit_80_columns(printed: Callable[[], str]) -> None:
    show(FIGURES)
    text = printed()
    titles = (
        "In process, temperature 0.8",
        "Over HTTP, temperature 0.8",
        "llama-460m, forced replay",
        "llama-460m: milliseconds",
    )
    assert all(title in text for title in titles)
    assert all(cell in text for cell in ("164/164", "123.46", "12.35", "1234.5", "12345.7"))
    assert "llama.cpp-http is not installed: pip install gguf 'llama-cpp-python[server]'" in text


def test_what_may_be_compared_shares_a_panel(tmp_path: Path) -> None:
    assert [len(rows) for _, rows in panels(FIGURES)] == [2, 1, 1]
    draw(FIGURES, tmp_path / "plots" / "peers.png")
    assert (tmp_path / "plots" / "peers.png").read_bytes().startswith(b"\x89PNG")
