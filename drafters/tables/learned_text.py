"""A corpus in memory of what earlier sessions have said, from which later ones draft. Its size is bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from outrider.drafters.interface import Ints
from outrider.drafters.tables.suffix import Corpus, index

# The index of this many tokens takes some milliseconds, so it is made in the decode loop.
MAX_TOKENS_IN_LOOP = 1 << 13
# The pool starts no thread before its first use.
INDEXER = ThreadPoolExecutor(1, "outrider-index")
# New tokens are indexed once they are this large a share of the indexed ones.
INDEXING_SHARE = 1 / 8


class LearnedText(Collection[Corpus]):
    """The most recent texts of sessions up to a number of tokens, as a corpus of one block."""

    def __init__(self, max_tokens: int, separator: int) -> None:
        """`separator` is larger than every token id."""
        self._max_tokens = max_tokens
        self._separator = separator
        self._texts: OrderedDict[Hashable, Ints] = OrderedDict()  # texts by session; the most recent last
        self._new_tokens = self._indexed_tokens = 0
        self._block = index(np.empty(0, np.int64), separator)
        self._indexing: Future[Corpus] | None = None

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Corpus]:
        return iter(self.current())

    def __contains__(self, block: object) -> bool:
        return block is self._block

    def __deepcopy__(self, memo: dict[int, Any]) -> LearnedText:
        """Itself: all sessions share the texts."""
        return self

    def add(self, session: Hashable, text: Ints) -> None:
        """Sets a session's text, int32 [N]; the end of a long one counts."""
        text = text[-self._max_tokens :].copy()
        earlier = self._texts.pop(session, None)
        self._texts[session] = text
        self._new_tokens += max(1, len(text) - (0 if earlier is None else len(earlier)))
        surplus = sum(map(len, self._texts.values())) - self._max_tokens
        while surplus > 0:
            surplus -= len(self._texts.popitem(last=False)[1])

    def current(self) -> tuple[Corpus, ...]:
        """The texts as one block, indexed again once they have grown enough to make a difference.

        A long text is indexed in a thread, because the decode loop calls this: until then, the block is the one before.
        """
        if self._indexing is not None and self._indexing.done():
            self._block, self._indexing = self._indexing.result(), None
        if self._indexing is None and self._new_tokens > INDEXING_SHARE * self._indexed_tokens:
            tokens = np.concatenate([np.append(self._separator, text) for text in self._texts.values()])
            self._new_tokens, self._indexed_tokens = 0, len(tokens)
            if len(tokens) <= MAX_TOKENS_IN_LOOP:
                self._block = index(tokens, self._separator)
            else:
                self._indexing = INDEXER.submit(index, tokens, self._separator)
        return (self._block,)

    def complete(self) -> tuple[Corpus, ...]:
        """`current` once a long text is indexed, for which it waits."""
        self.current()
        if self._indexing is not None:
            wait([self._indexing])
        return self.current()
