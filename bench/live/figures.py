"""Figures of contenders' answers to the same questions: speeds, paired ratios, equality with plain decoding."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.http.chat import Answer
from bench.live.turns import Contender

Row = dict[str, Any]
OUTRIDER = "outrider"
# The method without drafts. That of other peers is called "plain".
PLAIN = {OUTRIDER: "none"}


def record(found: Mapping[Contender, Sequence[Answer]], prompt_tokens: Sequence[int]) -> list[Row]:
    """A row per contender: the measurements of each answer, in order. `prompt_tokens` belong to the questions."""
    rows = []
    for contender, answers in found.items():
        plain = found.get(contender._replace(method=PLAIN.get(contender.peer, "plain")), [])
        row: Row = contender._asdict() | {
            "tokens": [answer.tokens for answer in answers],
            "seconds": [round(answer.seconds, 4) for answer in answers],
            "first_token_seconds": [round(answer.first_token_seconds or answer.seconds, 4) for answer in answers],
            "same_as_plain": [same(answer, other) for answer, other in zip(answers, plain, strict=False)],
            "same_prompt": [
                answer.prompt_tokens in (None, tokens) for answer, tokens in zip(answers, prompt_tokens, strict=True)
            ],
        }
        if all(answer.steps for answer in answers):
            row["steps"] = [answer.steps for answer in answers]
        rows.append(row)
    return rows


def same(answer: Answer, other: Answer) -> bool:
    """Whether two answers are equal: in their tokens where they are known, else in their texts."""
    return answer.ids == other.ids if answer.ids and other.ids else answer.text == other.text


def pool(parts: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows of several parts as one part's. A contender that is missing in a part is left out."""
    listed = [{(row["peer"], row["method"]): row for row in part["rows"]} for part in parts]
    shared = [key for key in listed[0] if all(key in rows for rows in listed)]
    return [concatenated([rows[key] for rows in listed]) for key in shared]


def concatenated(rows: Sequence[Row]) -> Row:
    """Rows of one contender as one row."""
    first = rows[0]
    lists = [name for name in first if isinstance(first[name], list) and all(name in row for row in rows)]
    names = {name: first[name] for name in ("peer", "method", "transport")}
    return names | {name: [value for row in rows for value in row[name]] for name in lists}


def figures(rows: Sequence[Row]) -> list[Row]:
    """A row of figures per contender; ratios are medians of the ratios of each question's speeds."""
    by_name = {(row["peer"], row["method"]): row for row in rows}
    found = []
    for row in rows:
        plain = by_name.get((row["peer"], PLAIN.get(row["peer"], "plain")))
        summary = summarize(row)
        if plain is not None and plain is not row:
            summary["over_plain"] = ratio(row, plain)
            summary["same_as_plain"] = count(row["same_as_plain"])
        if row["peer"] == OUTRIDER:
            summary |= over_best(row, [other for other in rows if other["peer"] != OUTRIDER])
        found.append(summary)
    return found


def summarize(row: Row) -> Row:
    """The figures of one contender."""
    tokens, seconds, first = sum(row["tokens"]), sum(row["seconds"]), sum(row["first_token_seconds"])
    summary: Row = {"peer": row["peer"], "method": row["method"], "transport": row["transport"]}
    summary["tokens_per_second"] = round(tokens / seconds, 2)
    summary["ms_per_token"] = round(1e3 * seconds / tokens, 3)
    if tokens > len(row["tokens"]):
        summary["ms_per_token_after_prompt"] = round(1e3 * (seconds - first) / (tokens - len(row["tokens"])), 3)
    summary["first_token_ms"] = round(1e3 * statistics.median(row["first_token_seconds"]), 1)
    if "steps" in row:
        summary["tokens_per_step"] = round(tokens / sum(row["steps"]), 3)
    if not all(row["same_prompt"]):
        summary["same_prompts"] = count(row["same_prompt"])
    return summary


def over_best(row: Row, others: Sequence[Row]) -> Row:
    """The smallest of the ratios to other programs, and the one that gave it."""
    ratios = {f"{other['peer']} {other['method']}": ratio(row, other) for other in others}
    if not ratios:
        return {}
    best = min(ratios, key=lambda name: ratios[name])
    return {"over_best_peer": ratios[best], "best_peer": best, "over_peers": ratios}


def ratio(row: Row, other: Row) -> float:
    """The median of the ratios of tokens per second, question by question."""
    return round(statistics.median(own / its for own, its in zip(speeds(row), speeds(other), strict=True)), 3)


def speeds(row: Row) -> list[float]:
    """Tokens per second of each answer."""
    return [tokens / seconds for tokens, seconds in zip(row["tokens"], row["seconds"], strict=True)]


def count(flags: Sequence[bool]) -> str:
    """How many are true, as "3/4"."""
    return f"{sum(flags)}/{len(flags)}"
