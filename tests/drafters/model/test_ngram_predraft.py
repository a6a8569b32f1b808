"""The tri-gram table guesses the latest successors, rarely while it is wrong, in bounded memory."""

from __future__ import annotations

from outrider.drafters.model.ngram_predraft import NgramPredraft
from outrider.drafters.policy import PROBE_INTERVAL


def test_the_latest_successors_are_guessed() -> None:
    table = NgramPredraft(3)
    table.learn([1, 2, 3, 4, 1, 2])
    assert table.guess([]) == [3, 4, 1]
    assert table.guess([3]) == [4, 1, 2]
    assert table.guess([9]) == []
    table.learn([7])
    assert table.guess([1, 2]) == [7]  # and 2, 7 has no successor
    assert NgramPredraft(0).guess([1, 2]) == []


def test_an_inaccurate_table_guesses_rarely() -> None:
    table = NgramPredraft(2)
    table.learn([1, 2] * 5)
    for _ in range(40):
        table.record(2, 0)
    guesses = sum(bool(table.guess([])) for _ in range(10 * PROBE_INTERVAL))
    assert guesses == 10
    for _ in range(40):
        table.record(2, 2)
    assert table.guess([])
