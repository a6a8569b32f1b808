"""Ratios are medians of pairs; equality is judged against the same program's plain answers."""

from __future__ import annotations

from bench.http.chat import Answer
from bench.live.figures import figures, pool, record
from bench.live.turns import Contender

PROMPTS = [4, 4, 4]
NONE, FUSION = Contender("outrider", "none", "HTTP"), Contender("outrider", "fusion", "HTTP")
LLAMA, DRAFTED = Contender("llama.cpp", "plain", "HTTP"), Contender("llama.cpp", "ngram-mod", "HTTP")


def answers(seconds: list[float], ids: list[int] | None, text: str, prompt: int = 4) -> list[Answer]:
    return [Answer(8, each, ids, 4, each / 2, prompt, text) for each in seconds]


def part() -> dict[str, object]:
    found = {
        NONE: answers([1.0, 2.0, 4.0], [1, 2], "x"),
        FUSION: answers([0.5, 1.0, 8.0], [1, 2], "x"),
        LLAMA: answers([1.0, 1.0, 1.0], None, "y", prompt=5),
        DRAFTED: answers([2.0, 2.0, 2.0], None, "z"),
    }
    return {"rows": record(found, PROMPTS)}


def test_a_burst_of_noise_does_not_move_a_median_of_pairs() -> None:
    none, fusion, llama, drafted = figures(pool([part()]))
    assert (none["tokens_per_second"], none["first_token_ms"], none["tokens_per_step"]) == (3.43, 1000.0, 2.0)
    assert "over_plain" not in none
    assert (fusion["over_plain"], fusion["same_as_plain"]) == (2.0, "3/3")
    assert (fusion["over_best_peer"], fusion["best_peer"]) == (1.0, "llama.cpp plain")
    assert fusion["over_peers"] == {"llama.cpp plain": 1.0, "llama.cpp ngram-mod": 2.0}
    assert (llama["same_prompts"], drafted["over_plain"], drafted["same_as_plain"]) == ("0/3", 0.5, "0/3")
    assert "over_best_peer" not in llama and "same_prompts" not in drafted


def test_parts_are_pooled_by_the_contenders_that_all_have() -> None:
    second = part()
    second["rows"] = second["rows"][:2]  # type: ignore[index]
    pooled = pool([part(), second])
    assert [(row["method"], len(row["tokens"])) for row in pooled] == [("none", 6), ("fusion", 6)]
