"""One session's draft model: a KV cache, and the rows of the tree that is being drafted.

No row in a session's cache is computed twice: accepted rows are committed in place, and a prompt is read from its first
difference on. A draft model samples with the target's noise, so a sampled draft is what the target would choose if both
models agreed on the probabilities (Gumbel coupling; Daliri et al., arXiv 2408.07978).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, Ints, Sampling
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.sequence import Reader, Sequence
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.sampling.rows import Logits, in_place
from outrider.verify.sampling.sampler import distribution, draw
from outrider.verify.sampling.topk import likeliest
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS

if TYPE_CHECKING:
    from outrider.verify.draft_model.runner import DraftRunner

T = TypeVar("T")
# At most this many tokens are read with a draft's root, because the logits of all are computed.
UNREAD_TOKENS = 16
# XORed into a seed, this gives an independent noise stream.
INDEPENDENT_SEED = 0x5851F42D4C957F2D


class SessionDraft:
    """One session's draft model. Implements `outrider.drafters.model.language_model.LanguageModel`."""

    is_sequential = False  # whether a row reads the state of the row above it

    def __init__(self, shared: DraftRunner) -> None:
        self._shared = shared
        self._text = Sequence()
        self._length = 0  # tokens committed here; the verifier may append more while a forward runs
        self._reader = Reader()
        self._params = SamplingParams(temperature=0)
        self._draws = 0  # number of rows that a request with rejection sampling has drawn after
        self._committed = -1  # rows in the cache before the tree; -1 = they have been lost
        # The tree below the text: row 0 is the text's last token.
        self._rows: list[int] = []  # tokens
        self._depths: list[int] = []
        self._ancestors = np.zeros((0, 0), np.bool_)  # [rows, rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> SessionDraft:
        """A fork, which has the rows of the forked text that this session has."""
        forked = type(self)(self._shared)
        forked._text, forked._reader = copy.deepcopy((self._text, self._reader), memo)
        self._shared.submit(lambda: self._shared.fork(self, forked, len(forked._text))).result()
        return forked

    def begin(self, text: Sequence, sampling: Sampling | None = None) -> None:
        params = SamplingParams(temperature=0) if sampling is None else cast(SamplingParams, sampling)
        if params.rule == "rejection":  # requires drafts that are independent of the target's noise
            params = replace(params, seed=params.seed ^ INDEPENDENT_SEED)
        self._params, self._draws = params, 0
        self._text, self._length = text, len(text)
        self._drop_rows()
        known = self._reader.begin(text)
        if (cache := self._shared.held_cache(self)) is not None:
            cache.truncate(min(known, len(text) - 1))

    @property
    def unread(self) -> int:
        cache = self._shared.held_cache(self)
        return max(1, self._length - (0 if cache is None else cache.length))

    def read(self, tokens: int) -> int:
        return self._read_chunk(self._shared.cache_for(self), min(tokens, PREFILL_CHUNK_TOKENS))

    @property
    def space(self) -> int:
        return max(0, min(MAX_NODES, self._shared.runner.context_tokens - self._length) - max(0, len(self._rows) - 1))

    def root(self, count: int) -> Candidates:
        cache = self._shared.cache_for(self)
        self._drop_rows()
        while self._read_chunk(cache, PREFILL_CHUNK_TOKENS):
            pass
        unread = self._unread(cache)
        logits = self._shared.forward(cache, ForwardBatch.chain(self._own(unread)))[-1:]
        cache.length += len(unread) - 1
        self._committed = cache.length
        self._rows, self._depths, self._ancestors = [int(unread[-1])], [0], np.ones((1, 1), np.bool_)
        return self._candidates(logits, [0], count)

    def expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        new, above, starts = list(tokens), list(parents), [0]
        for row, parent in enumerate(above if self.is_sequential else ()):
            if parent >= len(self._rows) + starts[-1]:
                starts.append(row)
        ends = [*starts[1:], len(new)]
        return joined([self._expand(new[a:b], above[a:b], count) for a, b in zip(starts, ends, strict=True)])

    def _expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        """`expand` by one forward."""
        known = len(self._rows)
        self._add_rows(tokens, parents)
        batch = ForwardBatch(self._own(self._rows).astype(np.int64), np.array(self._depths), self._ancestors, known)
        logits = self._shared.forward(self._shared.cache_for(self), batch)
        return self._candidates(logits, self._depths[known:], count)

    def _add_rows(self, tokens: Collection[int], parents: Collection[int]) -> None:
        known = len(self._rows)
        ancestors = np.eye(known + len(tokens), dtype=np.bool_)
        ancestors[:known, :known] = self._ancestors
        for row, parent in enumerate(parents, start=known):
            ancestors[row] |= ancestors[parent]
        self._rows += tokens
        for parent in parents:
            self._depths.append(self._depths[parent] + 1)
        self._ancestors = ancestors

    def retract(self, rows: int) -> None:
        self._rows, self._depths, self._ancestors = self._rows[:rows], self._depths[:rows], self._ancestors[:rows, :rows]

    def advance(self, tokens: Ints) -> None:
        path = self._follow(tokens.tolist())
        self._length += len(tokens)
        if not path:
            return
        cache = self._shared.cache_for(self)
        intact = cache.length == self._committed  # otherwise another session has taken it, and `root` reads the text again
        if intact:
            cache.commit(path)
        if len(path) <= len(tokens):  # the last token is not a row
            self._drop_rows()
            return
        if intact:
            cache.truncate(cache.length - 1)  # the last token becomes row 0
        self._committed = cache.length if intact else -1
        self._move_root(path)
        if self._rows and cache.missing_pages(len(self._rows)):  # their pages were dropped, and another session may take them
            self._drop_rows()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        return self._shared.submit(work)

    def _read_chunk(self, cache: KVCache, tokens: int) -> int:
        """Reads a chunk of the text, at most `tokens` long, if much of it is unread; returns its length."""
        unread = self._unread(cache)
        if len(unread) <= UNREAD_TOKENS:
            return 0
        chunk = unread[:-1][:tokens]
        self._shared.forward(cache, ForwardBatch.chain(self._own(chunk)), logits=False)
        cache.length += len(chunk)
        return len(chunk)

    def _unread(self, cache: KVCache) -> Ints:
        """The committed tokens that are not in the cache, int32 [N]."""
        return self._text.tokens[cache.length : self._length]

    def _own(self, tokens: Ints | list[int]) -> Ints:
        """The draft model's ids of tokens, int32 [N]."""
        return self._shared.ids.own[tokens]

    def _follow(self, tokens: Collection[int]) -> list[int]:
        """The rows along `tokens` from row 0 down; empty without rows."""
        if not self._rows:
            return []
        path = [0]
        for token in tokens:
            child = next((row for row in self._children(path[-1]) if self._rows[row] == token), None)
            if child is None:
                break
            path.append(child)
        return path

    def _children(self, parent: int) -> Iterator[int]:
        depth = self._depths[parent] + 1
        return (
            row for row in range(parent + 1, len(self._rows)) if self._ancestors[row, parent] and self._depths[row] == depth
        )

    def _move_root(self, path: list[int]) -> None:
        """Makes the last row of `path` row 0 if all later rows are below it and in place; otherwise drops the rows."""
        root = path[-1]
        if path != list(range(root + 1)) or not self._ancestors[root:, root].all():
            self._drop_rows()
            return
        self._rows, self._ancestors = self._rows[root:], self._ancestors[root:, root:]
        self._depths = [depth - self._depths[root] for depth in self._depths[root:]]

    def _drop_rows(self) -> None:
        self._rows, self._depths, self._ancestors = [], [], np.zeros((0, 0), np.bool_)

    def _candidates(self, logits: Logits, depths: Collection[int], count: int) -> Candidates:
        """Candidates for R rows at `depths` below the text's end, from logits [R, V]."""
        logits = self._shared.ids.drafted(in_place(logits))
        count = min(count, logits.shape[-1])
        if self._params.greedy:
            found: Any = likeliest(logits, count)
            if not isinstance(logits, np.ndarray):
                from outrider.verify.model.transfer import Download  # imports torch

                found = Download(*found).arrays()
            return Candidates(*found)
        positions = self._noise_positions(depths)
        needs_whole = self._params.rule == "rejection"
        vocabulary = len(self._shared.ids.own) if needs_whole else None
        if isinstance(logits, np.ndarray):
            return draw_all(logits, self._params, positions, count, vocabulary)
        from outrider.verify.sampling import device  # imports Triton

        return Candidates(*device.draw(logits, self._params, positions, count, vocabulary))

    def _noise_positions(self, depths: Collection[int]) -> list[int]:
        """The positions whose noise the rows at `depths` are sampled with.

        For rejection sampling each row has noise of its own. Whether a position is drafted again may depend on earlier draws
        for it that were never judged, so a draw with the same noise would be biased.
        """
        if self._params.rule == "rejection":
            self._draws += len(depths)
            return list(range(self._draws - len(depths), self._draws))
        first = self._length - self._text.prompt_length
        return [first + depth for depth in depths]


def joined(parts: list[Candidates]) -> Candidates:
    """The candidates of all rows, one part after the other."""
    tokens, probability, q = zip(*((each.tokens, each.probability, each.q) for each in parts), strict=True)
    return Candidates(np.concatenate(tokens), np.concatenate(probability), None if q[0] is None else np.concatenate(q))


def draw_all(
    logits: NDArray[np.float32], params: SamplingParams, positions: Collection[int], count: int, vocabulary: int | None
) -> Candidates:
    """`outrider.verify.sampling.device.draw` on the host."""
    drawn = [draw(row, params, position, count) for row, position in zip(logits, positions, strict=True)]
    tokens, shares = (np.stack(each) for each in zip(*drawn, strict=True))
    if vocabulary is None:
        return Candidates(tokens.astype(np.int32), shares)
    q = np.zeros((len(logits), vocabulary), np.float32)
    for row, known in zip(q, logits, strict=True):
        row[: logits.shape[1]] = distribution(known, params)
    return Candidates(tokens.astype(np.int32), shares, q)
