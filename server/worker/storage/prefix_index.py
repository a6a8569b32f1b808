"""Finds the texts that share the longest beginning with a prompt, by hashes of blocks of tokens."""

from collections.abc import Hashable, Iterator
from hashlib import blake2b
from typing import Generic, TypeVar

import numpy as np

from outrider.drafters.sequence import Ints

K = TypeVar("K", bound=Hashable)
# Beginnings are compared in units of a block.
BLOCK_TOKENS = 32


class PrefixIndex(Generic[K]):
    """Texts by key. The hash of a block covers all blocks before it and the text's owner, so owners share nothing."""

    def __init__(self) -> None:
        self._hashes: dict[K, list[bytes]] = {}
        self._keys: dict[bytes, dict[K, None]] = {}  # the texts that have a block, in the order of `put`, by its hash

    def put(self, key: K, owner: str, tokens: Ints) -> None:
        """Adds a text, int32 [N], or replaces it."""
        self.remove(key)
        self._hashes[key] = list(block_hashes(owner, tokens))
        for digest in self._hashes[key]:
            self._keys.setdefault(digest, {})[key] = None

    def remove(self, key: K) -> None:
        for digest in self._hashes.pop(key, ()):
            del self._keys[digest][key]
            if not self._keys[digest]:
                del self._keys[digest]

    def find(self, owner: str, tokens: Ints) -> list[K]:
        """The owner's texts that share the most blocks, at least one, with the beginning of `tokens`; the latest first."""
        found: dict[K, None] = {}
        for digest in block_hashes(owner, tokens):
            if digest not in self._keys:
                break
            found = self._keys[digest]
        return list(reversed(found))


def block_hashes(owner: str, tokens: Ints) -> Iterator[bytes]:
    state = blake2b(owner.encode("utf-8", "surrogateescape"), digest_size=16)
    tokens = np.ascontiguousarray(tokens, np.int32)
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        state.update(tokens[start : start + BLOCK_TOKENS].tobytes())
        yield state.copy().digest()
