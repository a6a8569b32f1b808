"""Levels on texts small enough to count by hand: buckets, contexts, each source, and their order."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables.contexts import Contexts, advance, enter, new_contexts
from outrider.drafters.tables.history import append
from outrider.drafters.tables.learned_table import learn
from outrider.drafters.tables.levels import (
    CORPUS,
    PREDICTION,
    SESSION,
    TABLE,
    Scratch,
    levels,
    new_scratch,
)
from outrider.drafters.tables.suffix import index
from tests.drafters.tables.sources import new_sources

SEPARATOR = 50
Level = tuple[int, int, dict[int, float]]  # source, context length, successor counts


def flat(documents: Sequence[Sequence[int]]) -> list[int]:
    return [token for document in documents for token in (SEPARATOR, *document)]


class Session:
    """A text read into the sources, without learning trust."""

    def __init__(
        self,
        text: Sequence[int] = (),
        corpora: Sequence[Sequence[Sequence[int]]] = ((),),
        prediction: Sequence[int] = (),
        table: Sequence[int] = (),
        trust: float = 0.0,
    ) -> None:
        blocks = tuple(index(np.array(flat(documents), np.int64), SEPARATOR) for documents in corpora)
        expected = np.array([len(prediction), *prediction], np.int32)
        self.sources = new_sources(blocks, trust, 1.0, expected)
        self.contexts: Contexts = new_contexts(4, len(blocks))
        self.scratch: Scratch = new_scratch(SEPARATOR + 1, len(blocks), 8)
        learn(self.sources.base, self.sources.rows, np.array(table, np.int32), len(table), 3, 1.0, 16.0)
        enter(self.sources, self.contexts, np.empty(0, np.int32))
        self.contexts.expected[0] = (1, 0) if prediction else (0, 0)
        self.read(text)

    def read(self, text: Sequence[int]) -> None:
        for token in text:
            append(self.sources.history, self.contexts.hashes[0], token)
            advance(self.sources, self.contexts, 0, token, 0)

    def context(self, row: int) -> list[list[int]]:
        return [np.asarray(array)[row].tolist() for array in self.contexts]

    def levels(self, row: int = 0, min_mass: float = 0.0) -> list[Level]:
        scratch = self.scratch
        found = []
        for level in range(levels(self.sources, self.contexts, row, scratch, min_mass)):
            part = slice(int(scratch.starts[level]), int(scratch.starts[level + 1]))
            counts = dict(zip(scratch.tokens[part].tolist(), scratch.counts[part].tolist(), strict=True))
            assert len(counts) == part.stop - part.start  # no token twice
            found.append((int(scratch.level_sources[level]), int(scratch.level_lengths[level]), counts))
        return found


def order(found: Sequence[Level]) -> list[tuple[int, int]]:
    return [(source, length) for source, length, _ in found]


def everything(trust: float = 0.0) -> Session:
    session = Session([1, 2, 5, 1, 2], [[[1, 2, 3], [0, 2, 4]]], prediction=[8], table=[1, 2, 6], trust=trust)
    session.contexts.expected[0] = (1, 0)
    return session


def test_the_order_of_levels() -> None:
    assert everything().levels() == [
        (PREDICTION, 0, {8: 1.0}),
        (TABLE, 2, {6: 0.75}),
        (SESSION, 2, {5: 1.0}),
        (CORPUS, 2, {3: 1.0}),
        (CORPUS, 1, {3: 1.0, 4: 1.0}),
        (SESSION, 0, {1: 2.0, 2: 2.0, 5: 1.0}),
        (CORPUS, 0, {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0, 4: 1.0}),
    ]


@pytest.mark.parametrize(("min_mass", "count"), [(0.6, 1), (0.5, 4), (1 / 16, 5), (1 / 32, 7), (0.0, 7)])
def test_shorter_contexts_are_skipped_once_little_mass_remains(min_mass: float, count: int) -> None:
    """With trust 1/2, the mass after the lengths with levels is 1/2 (prediction), 1/16, 1/32 and 1/128."""
    session = everything(trust=0.5)
    assert session.levels(min_mass=min_mass) == everything().levels()[:count]


@given(st.lists(st.integers(0, 4), max_size=120), st.lists(st.integers(0, 4), max_size=60))
def test_shares_are_a_distribution(corpus: list[int], text: list[int]) -> None:
    session = Session(text, [[corpus]])
    found = session.levels()
    for level, (_, _, counts) in enumerate(found):
        shares = [(count - session.scratch.discounts[level]) / session.scratch.norms[level] for count in counts.values()]
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(1.0)
    lengths = [length for _, length, _ in found]
    assert lengths == sorted(lengths, reverse=True)
