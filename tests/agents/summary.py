"""What each agent of bench/results/agents.json can do with the server, as a table for docs/agents.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

# At most this many tokens of a turn's prompt are read again by the next turn.
REREAD_TOKENS = 32
HEADERS = (
    "agent",
    "API",
    "chat",
    "tools",
    "full context",
    "streaming",
    "reuse",
    "tokens reused",
    "first token, s",
    "of the next turn, s",
)


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """The table, in Markdown. `runs` are those of one agent after the other, each with all tasks."""
    rows = [HEADERS, ["---"] * len(HEADERS), *(row(list(group)) for _, group in groupby(runs, key=lambda run: run["agent"]))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def row(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One agent's row."""
    by_task = {run["task"]: run for run in runs}
    short = (by_task[name]["requests"] for name in ("chat", "tools"))
    requests = [request for each in short for request in each if "prompt_tokens" in request]
    before, after = by_task["tools"]["requests"][-2:]  # the turn that calls the tool, and the next one
    slowest = max(request["first_token_ms"] for request in requests)
    reused = after["cached_tokens"] >= before["prompt_tokens"] - REREAD_TOKENS
    return [
        f"{runs[0]['agent']} {runs[0]['package'].rpartition('@')[2]}",
        f"`{after['route']}`",
        yes(by_task["chat"]["passed"]),
        yes(by_task["tools"]["passed"]),
        yes(by_task["overflow"]["passed"]),
        yes(all(request["stream"] for request in requests)),
        yes(reused),
        f"{after['cached_tokens']:,} of {after['prompt_tokens']:,}",
        f"{slowest / 1e3:.1f}",
        f"{after['first_token_ms'] / 1e3:.2f}",
    ]


def yes(value: bool) -> str:
    """A cell."""
    return "yes" if value else "no"
