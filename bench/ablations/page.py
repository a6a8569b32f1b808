"""The tables of ablations in Markdown, for docs/papers.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tables(results: Mapping[str, Any], paper: str) -> str:
    """A paragraph with the claim and a table for each ablation of a paper."""
    return "\n".join(section(name, result) for name, result in results.items() if result["paper"] == paper)


def section(name: str, result: Mapping[str, Any]) -> str:
    """One ablation."""
    rows = result["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [[column, *(cell(row.get(column)) for row in rows)] for column in columns]
    if not result["wide"]:
        lines = [list(line) for line in zip(*lines, strict=True)]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|" + "---|" * len(lines[0])
    return f"**{result['title']}** (`{name}`). The paper: {result['claim']}\n\n" + "\n".join([head, rule, *body, ""])


def cell(value: Any) -> str:
    """A figure with about three digits; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.1f}"
        if abs(value) >= 10
        else f"{value:.3g}"
        if abs(value) < 0.1
        else f"{value:.2f}"
    )
