"""Samples are judged along the emitted tokens, up to the first that is not accepted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from bench.model.rules import judged
from outrider.drafters.interface import Draws, Source, chain
from outrider.drafters.model.union import merge

MODEL = chain(np.array([1, 2, 3], np.int32), np.array([0.5, 0.4, 0.3]), Source.DRAFT)
Q = np.full(9, 1 / 9, np.float32)


def test_a_chain_is_judged_until_a_sample_differs() -> None:
    for tree in (MODEL, replace(MODEL, draws={row - 1: Draws(Q, (row,)) for row in range(3)})):
        assert judged(tree, [1, 2, 3, 4]) == [True, True, True]
        assert judged(tree, [1, 5]) == [True, False]
        assert judged(tree, [5]) == [False]


def test_guesses_are_not_samples() -> None:
    guesses = chain(np.array([5, 2], np.int32), np.array([0.9, 0.8]), Source.LOOKUP)
    tree = merge(guesses, replace(MODEL, draws={row - 1: Draws(Q, (row,)) for row in range(3)}), 8)
    assert judged(tree, [5, 2, 7]) == [False]
    assert judged(tree, [1, 2, 7]) == [True, True, False]
    assert judged(guesses, [5, 2]) == []
