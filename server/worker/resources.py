"""Maps the tables that drafters read. Datastores that change are opened again while the worker runs. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from outrider import models
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.model.pair import Pair
from outrider.drafters.native.library import AVAILABLE, MISSING
from outrider.drafters.options import Options
from outrider.drafters.registry import Resources
from outrider.drafters.tables import base_table, datastore
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.base_table import BaseArrays
from outrider.drafters.tables.learned_text import LearnedText
from outrider.drafters.tables.suffix import Corpus, index
from outrider.server.file_errors import reason
from outrider.server.settings import Settings

log = logging.getLogger("outrider.worker")
# The embedded tokenizer has fewer tokens.
EMBEDDED_TOKENS = 5000
# Datastores are checked for changes at this interval.
CHECK_SECONDS = 1.0
# This many corpora stay open after the requests that chose them, deleted ones included.
MAX_OPENED = 8
# Earlier texts of at most this many principals are kept. Those of the least recently used one are dropped first.
MAX_PRINCIPALS = 256


@dataclass(frozen=True)
class Tables:
    """The properties of a model that its tables must match."""

    compute_fingerprint: Callable[[], str]  # of the tokenizer
    vocabulary: int  # greater than every token id

    @cached_property
    def fingerprint(self) -> str:
        """The tokenizer's; computed when there is a table, because a large vocabulary takes a second."""
        return self.compute_fingerprint()

    @cached_property
    def no_text(self) -> Corpus:
        return index(np.empty(0, np.int64), self.vocabulary)


class Store:
    """A datastore, opened again after it has changed. A version that cannot be used is logged once, and the last one stays."""

    def __init__(self, path: Path, tables: Tables) -> None:
        """Raises ArrayFileError with one sentence."""
        self._path = path
        self._tables = tables
        self._version = datastore.version(path)
        self._blocks = self._load()
        self._checked_at = time.monotonic()

    def __len__(self) -> int:
        """The number of blocks, which never changes."""
        return len(self._blocks)

    def current(self) -> tuple[Corpus, ...]:
        """The blocks of the version that was current at most CHECK_SECONDS ago."""
        now = time.monotonic()
        if now - self._checked_at >= CHECK_SECONDS:
            self._checked_at = now
            self._refresh()
        return self._blocks

    def _refresh(self) -> None:
        version = datastore.version(self._path)
        if version is None or version == self._version:
            return
        self._version = version
        try:
            blocks = self._load()
        except (ArrayFileError, OSError) as error:
            log.warning("the changed datastore %s is not used: %s", self._path, error)
            return
        if len(blocks) != len(self._blocks):
            log.warning(
                "the changed datastore %s has %d blocks instead of %d; restart the server to use it",
                *(self._path, len(blocks), len(self._blocks)),
            )
            return
        self._blocks = blocks
        log.info("the datastore %s has changed and has %d tokens now", self._path, sum(block.size for block in blocks))

    def _load(self) -> tuple[Corpus, ...]:
        return tuple(datastore.load(self._path, self._tables.fingerprint, self._tables.vocabulary))


class ClientCorpora:
    """The corpora that requests choose, one block each."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._load = lru_cache(MAX_OPENED)(self._load_block)

    def open(self, block: str) -> Corpus:
        """The block of a file; an empty one if it cannot be used, or if its corpus was changed twice or deleted meanwhile."""
        try:
            return self._load(block)
        except (ArrayFileError, OSError) as error:
            if Path(block).exists():
                log.warning("a corpus is not used: %s", reason(error, block))
            return self._tables.no_text

    def _load_block(self, block: str) -> Corpus:
        return datastore.load_block(Path(block), self._tables.fingerprint, self._tables.vocabulary)


@dataclass(frozen=True, eq=False)
class Stores(Collection[Corpus]):
    """The blocks of several datastores, as they are at each iteration. Open blocks are closed with their last user."""

    stores: Sequence[Store]
    chosen: Corpus | None = None  # the corpus that a request has chosen, or an empty one; None without corpora
    learned: LearnedText | None = None  # what a principal's sessions have said; None if sessions learn only from themselves

    def __len__(self) -> int:
        return sum(map(len, self.stores)) + (self.chosen is not None) + (self.learned is not None)

    def __iter__(self) -> Iterator[Corpus]:
        yield from chain.from_iterable(store.current() for store in self.stores)
        yield from () if self.chosen is None else (self.chosen,)
        yield from () if self.learned is None else self.learned.current()

    def __contains__(self, block: object) -> bool:
        return any(block is each for each in self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Stores:
        """Itself: all sessions share the blocks."""
        return self


def load_resources(
    settings: Settings, tables: Tables, model: Callable[[], LanguageModel] | None = None, pair: Pair | None = None
) -> tuple[Resources, dict[str, Resources]]:
    """The shared resources, and those of each principal with its own datastores. Raises ArrayFileError with one sentence.

    `model` creates a session's draft model, which `pair` describes. No corpus is chosen, and nothing is learned yet.
    """
    if not AVAILABLE:
        log.warning("%s Until then, only the predictions of requests are drafted.", MISSING)
    opened = cache(lambda path: Store(Path(path), tables))  # a datastore that several keys name is opened once
    options = settings.speculation.options
    learned = LearnedText(1, tables.vocabulary) if settings.learns_from_sessions else None
    chosen = tables.no_text if settings.corpora.total_bytes else None

    def corpus(paths: Iterable[str]) -> Stores:
        return Stores([opened(path) for path in (*options.retrieval.datastores, *paths)], chosen, learned)

    shared = Resources(options, load_base(options, tables), corpus(()), tables.vocabulary, model, pair or Pair())
    own = {name: replace(shared, corpus=corpus(key.datastores)) for name, key in settings.auth.keys.items() if key.datastores}
    return shared, own


def load_base(options: Options, tables: Tables) -> BaseArrays:
    """The base table of n-grams. Raises ArrayFileError with one sentence."""
    table = options.trigram.table
    if table is None and tables.vocabulary > EMBEDDED_TOKENS:  # the embedded table fits the embedded tokenizer only
        return base_table.empty_base()
    try:
        return base_table.load(models.BASE_TABLE if table is None else Path(table), tables.fingerprint, tables.vocabulary)
    except ArrayFileError:
        if table is not None:
            raise
        return base_table.empty_base()


class LearnedTexts:
    """What principals' earlier sessions have said, from which their later ones draft.

    Each principal's texts have an index of bounded size, which no other principal's drafts read.
    """

    def __init__(self, max_tokens: int, separator: int) -> None:
        """`max_tokens` is the bound for each principal. `of` returns the texts of one."""
        self.of = lru_cache(MAX_PRINCIPALS)(lambda principal: LearnedText(max_tokens, separator))
