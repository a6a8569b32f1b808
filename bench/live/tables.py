"""The figures of `outrider bench live` as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from bench import report

COLUMNS = {
    "program": "peer",
    "method": "method",
    "tokens/s": "tokens_per_second:.1f",
    "ms/token,\nno prompt": "ms_per_token_after_prompt:.1f",
    "tokens\n/step": "tokens_per_step:.2f",
    "first\nms": "first_token_ms:.0f",
    "over\nplain": "over_plain:.2f",
    "over\nbest": "over_best_peer:.2f",
    "equal": "same_as_plain",
}
LEGEND = (
    "tokens/s: of whole requests, prompts included; ms/token: from the first token on. over plain: median over the "
    "questions of the ratio of tokens/s to the same program's without drafts; over best: to the other program and "
    "method to which it is smallest. equal: answers that are those of the same program without drafts."
)


def show(figures: Mapping[str, Any]) -> None:
    """Prints a table per temperature and task, and all tasks together."""
    for part in figures["summary"]:
        title = f"{part['task']}, temperature {part['temperature']:g}, {part['questions']} questions"
        report.print_figures(title, COLUMNS, part["rows"])
    console = Console(highlight=False, markup=False)
    console.print(f"\n{LEGEND}")
    for sentence in (*differing_prompts(figures), *figures["skipped"].values()):
        console.print(sentence)


def differing_prompts(figures: Mapping[str, Any]) -> list[str]:
    """A sentence for each contender that read other prompts than the model's tokenizer gives."""
    found = [
        f"{row['peer']} {row['method']} read as many prompt tokens as the model's tokenizer gives in {row['same_prompts']} "
        f"questions of {part['task']}, temperature {part['temperature']:g}."
        for part in figures["summary"]
        for row in part["rows"]
        if "same_prompts" in row
    ]
    return list(dict.fromkeys(found))
