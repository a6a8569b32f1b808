"""Contenders take turns, and figures are medians of paired repeats."""

from __future__ import annotations

from bench.peers.peer import Answer
from bench.peers.turns import Contender, count_items, figures, speed, take_turns

OURS, PLAIN, LOOKUP = Contender("outrider", "none"), Contender("llama.cpp", "plain"), Contender("llama.cpp", "lookup")


def test_contenders_take_turns_item_by_item() -> None:
    calls: list[str] = []
    advanced: list[int] = []

    def run(name: str, item: int) -> Answer:
        calls.append(f"{name}{item}")
        return Answer(item, 1.0)

    contenders = {OURS: lambda item: run("a", item), PLAIN: lambda item: run("b", item)}
    tallies = take_turns(contenders, [1, 2, 3], 2, lambda: advanced.append(1))
    assert calls == ["a1", "b1", "b2", "a2", *["a1", "b1", "b2", "a2", "a3", "b3"] * 2]
    assert len(advanced) == count_items(3, 2) == 8
    assert [[answer.tokens for answer in repeat] for repeat in tallies[PLAIN]] == [[1, 2, 3]] * 2


def test_other_items_may_warm_up() -> None:
    asked: list[int] = []

    def run(item: int) -> Answer:
        asked.append(item)
        return Answer(item, 1.0)

    tallies = take_turns({OURS: run}, [1, 2], 1, lambda: None, warm_up=[9])
    assert asked == [9, 1, 2]
    assert [answer.tokens for answer in tallies[OURS][0]] == [1, 2]


def test_ratios_are_medians_of_the_same_repeat() -> None:
    tallies = {
        OURS: [[Answer(10, 1.0, [1], 5)], [Answer(40, 1.0, [1], 20)], [Answer(90, 1.0, [1], 45)]],
        PLAIN: [[Answer(10, 1.0, [1])], [Answer(10, 1.0, [1])], [Answer(30, 1.0, [2])]],
    }
    ours, plain = figures(tallies)
    assert (ours["tokens_per_second"], ours["tokens_per_second_runs"]) == (40.0, [10.0, 40.0, 90.0])
    assert (ours["over_llama_plain"], plain["over_llama_plain"]) == (3.0, 1.0)
    assert "over_llama_lookup" not in ours
    assert ours["tokens_per_step"] == 2.0 and "tokens_per_step" not in plain
    assert (ours["same_tokens_as_first"], plain["same_tokens_as_first"]) == ("1/1", "0/1")


def test_servers_are_compared_with_servers() -> None:
    served = {contender._replace(transport="HTTP"): [[Answer(speed, 1.0)]] for contender, speed in ((OURS, 30), (LOOKUP, 20))}
    rows = figures({OURS: [[Answer(100, 1.0, [1])]], **served})
    assert [row.get("over_llama_lookup") for row in rows] == [None, 1.5, 1.0]
    assert all("same_tokens_as_first" not in row for row in rows[1:])


def test_speed_is_that_of_all_answers() -> None:
    assert speed([Answer(10, 1.0), Answer(20, 4.0)]) == 6.0
