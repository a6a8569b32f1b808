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
