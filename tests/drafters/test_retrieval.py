"""REST against brute force: the most frequent prefixes of the continuations of the longest match."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, NOTHING, Verdict
from outrider.drafters.options import RetrievalOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.tables.suffix import Corpus, index
from tests.drafts import Driven
from tests.trees import check

SEPARATOR = 6
Documents = list[list[int]]


def block(documents: Documents) -> Corpus:
    return index(np.array([t for document in documents for t in (SEPARATOR, *document)], np.int64), SEPARATOR)


def prefixes(documents: Documents, context: list[int], length: int) -> Counter[tuple[int, ...]]:
    """Counts the prefixes of all continuations of the longest match (1 to 16 tokens) that has any."""
    for size in range(min(16, len(context)), 0, -1):
        ending = context[len(context) - size :]
        found: Counter[tuple[int, ...]] = Counter()
        for document in documents:
            for i in range(size, len(document) + 1):
                if document[i - size : i] == ending:
                    rest = document[i : i + length]
                    found.update(tuple(rest[: n + 1]) for n in range(len(rest)))
        if found:
            return found
    return Counter()


documents = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=4)


@given(documents, st.lists(st.integers(0, 3), max_size=20), st.integers(1, 40))
def test_the_most_frequent_prefixes_are_drafted(texts: Documents, context: list[int], budget: int) -> None:
    drafter = Driven(RetrievalDrafter([block(texts)], RetrievalOptions(length=5)))
    drafter.begin(np.array(context, np.int32))
    tree = drafter.propose(budget)
    check(tree)
    expected = prefixes(texts, context, 5)
    assert len(tree) == min(budget, len(expected))
    drafted = [expected[tuple(tree.path(row))] for row in range(len(tree))]
    assert sorted(drafted, reverse=True) == sorted(expected.values(), reverse=True)[:budget]


def test_several_blocks_are_searched_together() -> None:
    one, two = [[1, 2, 3, 4]], [[1, 2, 3, 5], [0, 2, 3, 1]]
    drafter = Driven(RetrievalDrafter([block(one), block(two)], RetrievalOptions()))
    drafter.begin(np.array([1, 2, 3], np.int32))
    assert sorted(drafter.propose(8).tokens.tolist()) == [4, 5]
    drafter.observe(Verdict(EMPTY, NOTHING, np.array([0, 2, 3], np.int32)))
    assert drafter.propose(8).tokens.tolist() == [1]


def test_a_request_keeps_its_blocks_and_the_next_one_reads_the_current_ones() -> None:
    corpus = [block([[1, 2, 3]])]
    drafter = Driven(RetrievalDrafter(corpus, RetrievalOptions()))
    drafter.begin(np.array([1, 2], np.int32))
    corpus[0] = block([[1, 2, 4]])
    assert drafter.propose(8).tokens.tolist() == [3]
    drafter.end()
    drafter.begin(np.array([1, 2], np.int32))
    assert drafter.propose(8).tokens.tolist() == [4]
