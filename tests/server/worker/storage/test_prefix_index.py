"""The index finds the texts with the longest common beginning, in units of a block, and owners share nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.sequence import Ints, common_prefix
from outrider.server.worker.storage.prefix_index import BLOCK_TOKENS, PrefixIndex


def text(*parts: int) -> Ints:
    """A text of blocks, each filled with one token."""
    return np.repeat(np.array(parts, np.int32), BLOCK_TOKENS)


@given(st.lists(st.lists(st.integers(0, 1), max_size=5), min_size=1, max_size=6), st.lists(st.integers(0, 1), max_size=5))
def test_found_texts_share_as_many_blocks_as_any(texts: list[list[int]], prompt: list[int]) -> None:
    index: PrefixIndex[int] = PrefixIndex()
    for number, parts in enumerate(texts):
        index.put(number, "alice", text(*parts))
    shared = [common_prefix(text(*parts), text(*prompt)) // BLOCK_TOKENS for parts in texts]
    best = max(shared)
    expected = {number for number, count in enumerate(shared) if count == best} if best else set()
    assert set(index.find("alice", text(*prompt))) == expected
