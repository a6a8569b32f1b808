"""Contenders take turns item by item, because the machine's speed changes over time; ratios are those of one repeat."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from bench.peers.peer import Answer, Transport

Item = TypeVar("Item")
WARM_UP_ITEMS = 2
BASELINES = {"plain": ("llama.cpp", "plain"), "lookup": ("llama.cpp", "lookup")}  # of the ratios, by the name of the figure


class Contender(NamedTuple):
    """A peer and one of its methods."""

    peer: str
    method: str
    transport: Transport = "in process"


Tallies = Mapping[Contender, list[list[Answer]]]  # the answers of each repeat


def take_turns(
    contenders: Mapping[Contender, Callable[[Item], Answer]],
    items: Sequence[Item],
    repeats: int,
    advance: Callable[[], None],
    warm_up: Sequence[Item] | None = None,
) -> Tallies:
    """Every contender answers an item before the next item's turn, and each item begins with another contender.

    A first round over `warm_up`, by default the first items, is not measured. `advance` counts items.
    """
    order = list(contenders.items())
    tallies: dict[Contender, list[list[Answer]]] = {contender: [] for contender in contenders}
    for repeat in range(repeats + 1):
        found: dict[Contender, list[Answer]] = {contender: [] for contender in contenders}
        first = items[:WARM_UP_ITEMS] if warm_up is None else warm_up
        for index, item in enumerate(items if repeat else first):
            turn = index % len(order)
            for contender, run in (*order[turn:], *order[:turn]):
                found[contender].append(run(item))
            advance()
        if repeat:
            for contender, answers in found.items():
                tallies[contender].append(answers)
    return tallies


def count_items(items: int, repeats: int) -> int:
    """How often `take_turns` advances."""
    return items * repeats + min(items, WARM_UP_ITEMS)


def figures(tallies: Tallies) -> list[dict[str, Any]]:
    """A row per contender: medians of the repeats, and medians of the ratios to llama.cpp in the same repeat."""
    speeds = {contender: [speed(answers) for answers in repeats] for contender, repeats in tallies.items()}
    first = next(iter(tallies.values()))[-1]
    rows = []
    for contender, repeats in tallies.items():
        row: dict[str, Any] = contender._asdict()
        row["tokens_per_second"] = round(statistics.median(speeds[contender]), 2)
        row["tokens_per_second_runs"] = [round(value, 2) for value in speeds[contender]]
        for name, baseline in BASELINES.items():
            other = Contender(*baseline, contender.transport)
            if other in speeds:
                pairs = zip(speeds[contender], speeds[other], strict=True)
                row[f"over_llama_{name}"] = round(statistics.median(own / its for own, its in pairs), 3)
        last = repeats[-1]
        if all(answer.steps for answer in last):
            row["tokens_per_step"] = round(sum(answer.tokens for answer in last) / sum(answer.steps or 0 for answer in last), 3)
        if all(answer.ids is not None for answer in (*first, *last)):
            row["same_tokens_as_first"] = f"{sum(a.ids == b.ids for a, b in zip(first, last, strict=True))}/{len(first)}"
        rows.append(row)
    return rows


def speed(answers: Sequence[Answer]) -> float:
    """Tokens per second of all answers."""
    return sum(answer.tokens for answer in answers) / sum(answer.seconds for answer in answers)
