"""Drafts of what followed the same text before: in a session, a prediction, a datastore, or the window of lookahead."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import EMPTY, MAX_NODES, NOTHING, DraftTree, Ints, Verdict
from outrider.drafters.lookahead import LookaheadDrafter
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookaheadOptions, LookupOptions, RetrievalOptions
from outrider.drafters.prediction import PredictionDrafter, realign
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.tables.suffix import Corpus, index
from tests.drafts import Driven
from tests.trees import check


@given(text=st.lists(st.integers(0, 4), min_size=1, max_size=80), budget=st.integers(1, MAX_NODES))
def test_drafts_are_well_formed_parts_of_the_text(text: list[int], budget: int) -> None:
    drafter = Driven(LookupDrafter(LookupOptions()))
    drafter.begin(np.array(text, np.int32))
    tree = drafter.propose(budget)
    check(tree)
    assert len(tree) <= budget
    words = " ".join(map(str, text))
    for row in range(len(tree)):
        assert " ".join(map(str, tree.path(row))) in words


def test_continuations_are_drafted_most_frequent_first() -> None:
    text = np.array([1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2], np.int32)
    drafter = Driven(LookupDrafter(LookupOptions()))
    drafter.begin(text)
    tree = drafter.propose(8)
    assert tree.tokens[tree.parents == -1].tolist() == [3, 4]


EXPECTED = np.arange(100, 200, dtype=np.int32)


def steps(answer: Ints, expected: Ints = EXPECTED) -> int:
    """The number of decoding steps for `answer` with a verifier that accepts exactly its tokens."""
    drafter = Driven(PredictionDrafter())
    drafter.begin(np.array([1, 2], np.int32), expected)
    at = count = 0
    while at < len(answer):
        tree = drafter.propose(64)
        check(tree)
        agree = 0
        while agree < len(tree) and at + agree < len(answer) and tree.tokens[agree] == answer[at + agree]:
            agree += 1
        drafter.observe(Verdict(tree, np.arange(agree, dtype=np.int32), answer[at : at + agree + 1]))
        at += agree + 1
        count += 1
    return count


def test_an_exact_prediction_costs_few_steps() -> None:
    assert steps(EXPECTED) == 4  # 32 draft tokens and a bonus token per step


@pytest.mark.parametrize(
    "edited",
    [
        np.concatenate([EXPECTED[:40], [7], EXPECTED[41:]]),  # a token replaced
        np.concatenate([EXPECTED[:40], [7, 8, 9], EXPECTED[40:]]),  # tokens inserted
        np.concatenate([EXPECTED[:40], EXPECTED[60:]]),  # tokens left out
        np.concatenate([EXPECTED[:40], [7, 8, 9], EXPECTED[55:]]),
    ],
)
def test_an_edit_is_followed_by_realignment(edited: Ints) -> None:
    assert steps(edited.astype(np.int32)) <= 10


def test_realigning_prefers_the_longest_then_the_nearest() -> None:
    expected = np.array([5, 6, 7, 1, 6, 7, 2, 5, 6, 7, 3], np.int32)
    assert realign(expected, np.array([5, 6, 7], np.int32), 8) == 10
    assert realign(expected, np.array([5, 6, 7], np.int32), 2) == 3
    assert realign(expected, np.array([9, 6, 7], np.int32), 5) == 6
    assert realign(expected, np.array([9], np.int32), 5) == 5


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


def target(last: int) -> int:
    return last * 5 % 97  # 5 generates all non-zero residues, so the text has a period of 96 tokens


def verify(tree: DraftTree, text: list[int]) -> Verdict:
    """The target's choices at the root and at every node, and the accepted path."""
    chosen = [target(text[-1])]
    for row in range(len(tree)):
        chosen.append(target(int(tree.tokens[row])))
    rows: list[int] = []
    tokens = [chosen[0]]
    node = -1
    while True:
        below = [r for r in range(len(tree)) if tree.parents[r] == node and tree.tokens[r] == tokens[-1]]
        if not below:
            break
        node = below[0]
        rows.append(node)
        tokens.append(chosen[node + 1])
    ids = np.array(chosen, np.int32)[:, None]
    return Verdict(tree, np.array(rows, np.int32), np.array(tokens, np.int32), ids, np.ones_like(ids, np.float32))


def run(options: LookaheadOptions, length: int, budget: int = 64) -> tuple[list[int], int]:
    drafter = Driven(LookaheadDrafter(options))
    text = [3, 1, 4]
    drafter.begin(np.array(text, np.int32))
    steps = 0
    while len(text) < length:
        tree = drafter.propose(budget)
        check(tree)
        assert len(tree) <= budget
        verdict = verify(tree, text)
        drafter.observe(verdict)
        text += verdict.tokens.tolist()
        steps += 1
    drafter.end()
    return text, steps


@given(st.integers(1, 8), st.integers(2, 6), st.integers(1, 8), st.integers(1, MAX_NODES))
def test_trees_are_well_formed_for_all_settings(window: int, ngram: int, guesses: int, budget: int) -> None:
    text, _ = run(LookaheadOptions(window, ngram, guesses), 60, budget)
    assert all(text[i] == target(text[i - 1]) for i in range(3, len(text)))


def test_the_window_finds_tokens_that_are_not_in_the_text() -> None:
    fresh = 90
    with_window, without = (run(LookaheadOptions(window=w, ngram=4, guesses=4), fresh)[1] for w in (8, 1))
    assert without == fresh - 3
    assert with_window < 0.9 * without


def test_repetition_is_drafted_from_the_pool() -> None:
    _, steps = run(LookaheadOptions(), 2000)
    assert steps < 1000
