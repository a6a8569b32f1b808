"""What a principal's earlier sessions have said, as a datastore for the drafts of its later ones. In memory only.

Each principal's texts are an index of their own, of bounded size, that no other principal's drafts read. Drafts change no
answer, so neither does what was learned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from outrider.drafters.interface import Ints
from outrider.drafters.tables.suffix import Corpus, index

MAX_PRINCIPALS = 256  # with texts; the least recently used is dropped first
MAX_TOKENS_IN_LOOP = 1 << 13  # whose index takes some milliseconds
INDEXER = ThreadPoolExecutor(1, "outrider-index")  # starts no thread before its first use
INDEXING_SHARE = 1 / 8  # new tokens, relative to the indexed ones, that make it worth indexing again


class LearnedText:
    """One principal's texts, the most recent ones up to a number of tokens. A block for
    `outrider.server.worker.resources.Stores`.
    """

    def __init__(self, max_tokens: int, separator: int) -> None:
        """`separator` is larger than every token id."""
        self._max_tokens = max_tokens
        self._separator = separator
        self._texts: OrderedDict[Hashable, Ints] = OrderedDict()  # by session; the most recent last
        self._new_tokens = self._indexed_tokens = 0
        self._block = index(np.empty(0, np.int64), separator)
        self._indexing: Future[Corpus] | None = None

    def __len__(self) -> int:
        """The number of blocks."""
        return 1

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


class LearnedTexts:
    """The texts of all principals."""

    def __init__(self, max_tokens: int, separator: int) -> None:
        """`max_tokens` is the bound for each principal."""
        self._max_tokens = max_tokens
        self._separator = separator
        self._by_principal: OrderedDict[str, LearnedText] = OrderedDict()  # least recently used first

    def of(self, principal: str) -> LearnedText:
        """The texts of a principal."""
        if principal not in self._by_principal:
            self._by_principal[principal] = LearnedText(self._max_tokens, self._separator)
        self._by_principal.move_to_end(principal)
        if len(self._by_principal) > MAX_PRINCIPALS:
            self._by_principal.popitem(last=False)
        return self._by_principal[principal]
