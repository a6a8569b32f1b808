"""The text of a session, its prefixes, ends and contexts; and draft trees, their paths and cuts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import DraftTree, arrange
from outrider.drafters.sequence import Reader, Sequence, common_prefix
from tests.trees import check, trees


def ints(*tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(tokens, np.int32)


texts = st.lists(st.integers(0, 2), max_size=12)


@given(st.lists(st.tuples(texts, texts), min_size=1, max_size=6))
def test_the_text_is_the_prompt_and_the_appended_tokens(requests: list[tuple[list[int], list[int]]]) -> None:
    sequence = Sequence()
    for prompt, answer in requests:
        sequence.begin(ints(*prompt))
        for token in answer:
            sequence.append(ints(token))
        assert sequence.tokens.tolist() == [*prompt, *answer]
        assert sequence.answer.tolist() == answer
        assert sequence.emitted == len(answer)


@given(st.lists(st.tuples(texts, st.booleans()), min_size=1, max_size=8))
def test_a_reader_knows_the_prefix_unchanged_since_its_last_request(history: list[tuple[list[int], bool]]) -> None:
    sequence, reader, read = Sequence(), Reader(), list[int]()
    for prompt, reads in history:
        sequence.begin(ints(*prompt))
        read = read[: common_prefix(ints(*read), ints(*prompt))]
        if reads:
            assert reader.begin(sequence) == len(read)
            read = list(prompt)


def test_an_answer_ends_at_its_limit() -> None:
    sequence = Sequence(ints(1, 2), max_tokens=3)
    assert sequence.admits(ints(5, 6)) == 2
    sequence.append(ints(5, 6))
    assert (sequence.remaining, sequence.finish) == (1, None)
    assert sequence.admits(ints(7, 8, 9)) == 1
    sequence.append(ints(7))
    assert (sequence.remaining, sequence.finish) == (0, "length")


def test_an_answer_ends_with_its_first_stop_token_but_a_prompt_does_not() -> None:
    sequence = Sequence(ints(1, 9), max_tokens=3, stop_ids=[9])
    assert sequence.finish is None
    assert sequence.admits(ints(5, 9, 9)) == 2
    sequence.append(ints(5, 9))
    assert sequence.finish == "stop"
    full = Sequence(ints(1), max_tokens=1, stop_ids=[9])
    full.append(ints(9))
    assert full.finish == "stop"  # a stop token at the limit is still a stop


def test_a_clone_begins_with_the_same_tokens_and_goes_on_alone() -> None:
    sequence = Sequence(ints(1, 2, 3), max_tokens=8, stop_ids=[9])
    sequence.append(ints(4, 5))
    reader, other = Reader(), Reader()
    reader.begin(sequence)
    cloned = sequence.clone(4)
    other.resume(cloned, reader.known)
    cloned.append(ints(9))
    sequence.append(ints(6, 7))
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7] and sequence.finish is None
    assert cloned.tokens.tolist() == [1, 2, 3, 4, 9] and cloned.finish == "stop"
    cloned.begin(ints(1, 2, 8))
    assert other.known == 2 and reader.known == 7


@given(trees(), st.integers(0, 6))
def test_limit_keeps_exactly_the_shallow_nodes(tree: DraftTree, depth: int) -> None:
    limited = tree.limit(depth)
    check(limited)
    assert [limited.path(row) for row in range(len(limited))] == [
        tree.path(row) for row in range(len(tree)) if tree.depths[row] <= depth
    ]


@given(trees(vocabulary=4), st.lists(st.integers(0, 3), max_size=6))
def test_a_tree_is_followed_as_far_as_it_has_the_tokens(tree: DraftTree, tokens: list[int]) -> None:
    rows = tree.follow(np.array(tokens, np.int32)).tolist()
    assert all(tree.path(row) == tokens[: depth + 1] for depth, row in enumerate(rows))
    paths = {tuple(tree.path(row)) for row in range(len(tree))}
    assert len(rows) == len(tokens) or tuple(tokens[: len(rows) + 1]) not in paths


def test_arranged_nodes_are_depth_first_with_siblings_in_order() -> None:
    tree, order = arrange(
        tokens=[1, 2, 3, 4, 5], parents=[-1, -1, 0, 1, 0], probability=[0.9, 0.8, 0.5, 0.4, 0.3], source=[0] * 5
    )
    check(tree)
    assert order == [0, 2, 4, 1, 3]
    assert tree.tokens.tolist() == [1, 3, 5, 2, 4]
    assert tree.depths.tolist() == [1, 2, 2, 1, 2]
