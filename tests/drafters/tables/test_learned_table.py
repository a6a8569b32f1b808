"""Adaptive rows equal a dictionary model within bounded memory."""

from collections import defaultdict

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables import base_table
from outrider.drafters.tables.learned_table import LearnedRows, absorb, learn, new_rows, successors

BASE = base_table.empty_base()


def lookup(rows: LearnedRows, previous: int, last: int, size: int = 8) -> dict[int, float]:
    tokens, probabilities = np.zeros(size, np.int32), np.zeros(size, np.float32)
    found = successors(BASE, rows, -1, previous, last, 3, tokens, probabilities)
    assert np.all(np.diff(probabilities[:found]) <= 0)
    return dict(zip(tokens[:found].tolist(), probabilities[:found].tolist(), strict=True))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60))
def test_probabilities_equal_a_dictionary_model(text: list[int]) -> None:
    rows = new_rows(1024, 8)
    learn(BASE, rows, np.array(text, np.int32), len(text), 3, 1.0, 1000.0)
    counts: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for i in range(1, len(text)):
        counts[-1, text[i - 1]][text[i]] += 1
        if i >= 2:
            counts[text[i - 2], text[i - 1]][text[i]] += 1
    found_rows = lookup(rows, text[-2], text[-1])
    expected: dict[int, float] = defaultdict(float)
    remaining = 1.0
    for context in ((text[-2], text[-1]), (-1, text[-1])):
        found = counts.get(context, {})
        total = 1.0 + sum(found.values())  # 1 = missing mass of a context that is not in the base table
        for token, count in found.items():
            expected[token] += remaining * count / total
        remaining -= remaining * sum(found.values()) / total
    assert found_rows.keys() == expected.keys()
    assert all(abs(found_rows[t] - expected[t]) < 1e-5 for t in expected)
    assert sum(found_rows.values()) < 1.0


def test_the_targets_distribution_is_absorbed_at_every_node() -> None:
    rows = new_rows(64, 8)
    text = np.array([-1, 1, 2], np.int32)
    tokens, parents = np.array([3, 4, 5], np.int32), np.array([-1, 0, -1], np.int32)
    ids = np.array([[3, 5], [4, 9], [6, 7], [8, 0]], np.int32)
    probabilities = np.array([[0.6, 0.3], [0.5, 0.2], [0.9, 0.1], [0.4, 0.4]], np.float32)
    absorb(BASE, rows, text, tokens, parents, ids, probabilities, 3)
    assert list(lookup(rows, 1, 2)) == [3, 5]
    assert list(lookup(rows, 2, 3)) == [4, 9]
    assert list(lookup(rows, 3, 4)) == [6, 7]
    assert set(lookup(rows, 2, 5)) == {8, 0}  # rejected nodes are absorbed, too
    assert list(lookup(rows, 0, 3)) == [4, 9]  # an unseen context backs off to its last token
    assert lookup(rows, 0, 3)[4] < lookup(rows, 2, 3)[4]
    assert sum(lookup(rows, 1, 2).values()) <= 1.0 + 1e-6
