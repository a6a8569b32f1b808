"""The tables of ablations in Markdown, for docs/papers.md."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


def tables(results: Mapping[str, Any], paper: str) -> str:
    """A paragraph with the claim and a table for each ablation of a paper."""
    return "\n".join(section(name, result) for name, result in results.items() if result["paper"] == paper)


def section(name: str, result: Mapping[str, Any]) -> str:
    """One ablation."""
    rows = result["rows"]
    lines = [[column, *(cell(row.get(column)) for row in rows)] for column in columns_of(rows)]
    if not result["wide"]:
        lines = [list(line) for line in zip(*lines, strict=True)]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    rule = "|" + "---|" * len(lines[0])
    return f"**{result['title']}** (`{name}`). The paper: {result['claim']}\n\n" + "\n".join([head, rule, *body, ""])


def columns_of(rows: Collection[Mapping[str, Any]]) -> list[str]:
    """The columns of a table, in order."""
    return list(dict.fromkeys(column for row in rows for column in row))


def cell(value: Any) -> str:
    """A figure with about three digits; empty if there is none."""
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return str(value)
    size = abs(value)
    return format(value, ",.0f" if size >= 100 else ".1f" if size >= 10 else ".2f" if size >= 0.1 else ".3g")
