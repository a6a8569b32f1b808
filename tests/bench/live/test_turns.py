"""Contenders take turns; missing packages are named with the command that installs them."""

from __future__ import annotations

import pytest

from bench.live.turns import Answer, Contender, parse_peers, take_turns
from bench.plan import BenchError

OURS, PLAIN = Contender("outrider", "none"), Contender("llama.cpp", "plain")


def test_contenders_take_turns_item_by_item() -> None:
    calls: list[str] = []
    advanced: list[int] = []

    def run(name: str, item: int) -> Answer:
        calls.append(f"{name}{item}")
        return Answer(item, 1.0)

    found = take_turns(
        {OURS: lambda item: run("a", item), PLAIN: lambda item: run("b", item)}, [1, 2, 3], 9, lambda: advanced.append(1)
    )
    assert calls == ["a9", "b9", "a1", "b1", "b2", "a2", "a3", "b3"]
    assert len(advanced) == 4
    assert [answer.tokens for answer in found[PLAIN]] == [1, 2, 3]


def test_peers_are_chosen_by_name() -> None:
    assert parse_peers("llama.cpp,outrider", ["outrider", "llama.cpp"]) == ["outrider", "llama.cpp"]
    assert parse_peers("", ["outrider"]) == []
    with pytest.raises(BenchError, match="no peer ollama"):
        parse_peers("ollama", ["outrider"])
