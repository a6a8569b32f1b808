"""The trie against a dictionary of paths."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.interface import Source
from outrider.drafters.tables.trie import Trie, child, new_trie, restart


def insert(trie: Trie, size: int, tokens: list[int]) -> tuple[int, int]:
    """Follows or adds a path; returns its last node and the trie's size."""
    node = 0
    for token in tokens:
        node, size = child(trie, size, node, token, Source.RETRIEVAL)
    return node, size


def test_common_prefixes_share_nodes() -> None:
    trie = new_trie(8)
    restart(trie)
    first, size = insert(trie, 1, [5, 6, 7])
    second, size = insert(trie, size, [5, 6, 8])
    again, size = insert(trie, size, [5, 6, 7])
    assert (first, second, again, size) == (3, 4, 3, 5)
    assert trie.nodes.tokens[1:5].tolist() == [5, 6, 7, 8]
    assert trie.nodes.parents[1:5].tolist() == [0, 1, 2, 2]
    assert trie.nodes.depths[1:5].tolist() == [1, 2, 3, 3]
    assert trie.nodes.source[1:5].tolist() == [Source.RETRIEVAL] * 4


def test_a_restart_empties_the_trie() -> None:
    trie = new_trie(8)
    restart(trie)
    node, size = insert(trie, 1, [5, 6])
    trie.counts[:size] += 3
    restart(trie)
    assert trie.counts[0] == 0
    node, size = insert(trie, 1, [6])
    assert (node, size) == (1, 2)
    assert trie.counts[1] == 0


@given(st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=5), max_size=20), st.integers(1, 3))
def test_nodes_are_the_distinct_prefixes(paths: list[list[int]], rounds: int) -> None:
    prefixes = {tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)}
    trie = new_trie(1 + len(prefixes))  # full at the end
    for _ in range(rounds):
        restart(trie)
        size = 1
        nodes: dict[tuple[int, ...], int] = {}
        for path in paths:
            node, size = insert(trie, size, path)
            assert nodes.setdefault(tuple(path), node) == node
        assert size == 1 + len(prefixes)
        found = set()
        for node in range(1, size):
            tokens: list[int] = []
            while node:
                tokens.append(int(trie.nodes.tokens[node]))
                node = int(trie.nodes.parents[node])
            found.add(tuple(reversed(tokens)))
        assert found == prefixes
