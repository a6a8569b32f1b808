"""A block head with the target that it reads: its forwards over a cache, and a session's blocks.

The cache has keys and values of the context only, which the head computes from the target's states. A block's rows are written
behind them and never committed: the next draft reads the target's states of the tokens that were accepted.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from outrider.drafters.interface import Ints
from outrider.drafters.model.language_model import Candidates
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import UNREAD_TOKENS, SessionDraft
from outrider.verify.heads.blocks import BlockHead, BlockShape
from outrider.verify.heads.model import HeadCache, HeadModel, HeadSession, Target
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch, Segment, keep_hidden
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.sampling.rows import Logits
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS


class BlockAttention(TorchAttention):
    """The attention of a block's rows, which follow known rows of the context."""

    def __init__(self, cache: TensorCache, batch: ForwardBatch, shape: BlockShape) -> None:
        # Where windows are counted from the anchor, its position is that of all rows.
        depths = np.minimum(batch.depths, batch.known) if shape.anchored_windows else batch.depths
        super().__init__(cache, replace(batch, depths=depths))
        self._shape = shape

    def visible(self, window: int | None) -> torch.Tensor:
        found, known = super().visible(window), self._batch.known
        if self._shape.full_both_ways if window is None else self._shape.windows_both_ways:
            found[known:, known:] = True
        return found


class BlockCache(HeadCache):
    """The context of a text. A row reads the state at its own position."""

    lag = 0


class BlockModel(HeadModel):
    """A block head on its target's device. Caches on a GPU are in pages; no graphs are captured."""

    def __init__(self, head: BlockHead, target: Target, pack: bool = True) -> None:
        super().__init__(head, target, pack)
        self.block, self._shape, self.drafted = head, head.shape, head.shape.drafted
        self.description += repr(head.shape)
        layers = tuple(layer._replace(window=None) for layer in self.cache_shape.layers)
        self.cache_shape = self._own_shape = replace(self.cache_shape, layers=layers)

    def new_cache(self) -> BlockCache:
        return BlockCache(self._new_rows())

    def new_session(self, shared: DraftRunner) -> SessionDraft:
        return BlockDraft(shared)

    def _capture(self, pool: PagePool) -> None:
        """Nothing: blocks are computed without graphs."""

    @torch.inference_mode()
    def forward(self, cache: HeadCache, batch: ForwardBatch, logits: bool | None = True) -> torch.Tensor:
        """Reads the target's states of committed tokens; with `logits`, the last one is a block's anchor instead.

        Returns the own logits of the drafted rows [drafted, own vocabulary], and leaves the states of the block's rows in the
        cache, behind the context.
        """
        known = len(batch) - bool(logits)
        block = [int(batch.tokens[-1]), *[self._shape.mask_token] * (self._shape.rows - 1)] if logits else []
        tokens = np.array([*batch.tokens[:known].tolist(), *block], np.int64)
        rows = ForwardBatch(tokens, np.arange(len(tokens)), known=known)
        cache.rows.reserve(len(tokens))
        self._read(cache, known)
        if not logits:
            return torch.zeros(1, 1, device=self.device)
        positions, segment = torch.from_numpy(rows.positions(cache.length)), Segment(cache.rows, rows)
        embedded = torch.from_numpy(tokens[known:])
        states = self._advance(embedded, positions, torch.zeros(0), BlockAttention(cache.rows, rows, self._shape))
        keep_hidden(states, [segment])
        return self.block.logits(states[None, -self._shape.drafted :], self._lm_head)[0]

    def _read(self, cache: HeadCache, count: int) -> None:
        """Writes the keys and values of `count` committed tokens."""
        if not count:
            return
        states, start = torch.zeros(count, self._width), cache.length
        if cache.source is not None:
            cache.source.wait()
            states = cache.source.read(start, start + count)
        positions = torch.arange(start, start + count, device=self.device)[None]
        for layer, (keys, values) in enumerate(self.block.context(self._fused(states)[None], positions)):
            cache.rows.write(layer, keys[0], values[0])


class BlockDraft(HeadSession):
    """One session's blocks. Implements `outrider.drafters.model.language_model.LanguageModel`.

    A forward computes a block; rows below its anchor take their candidates from the position at their depth.
    """

    _logits: torch.Tensor  # [drafted, own vocabulary]
    _states: torch.Tensor  # [drafted, size]
    _first = 0  # the block's position that follows row 0
    _memory: list[torch.Tensor]  # of rows, [1, rank] each
    _found: Candidates | None = None  # of all positions, if none depends on the tokens before it

    @property
    def unread(self) -> int:
        missing = super().unread
        return missing if missing > UNREAD_TOKENS else 1  # few states are read with the next draft

    def read(self, tokens: int) -> int:
        self._prepare(self._cache)
        return super().read(tokens)

    @property
    def space(self) -> int:
        deepest = self._first + max(self._depths, default=-1)
        return super().space if not self._rows or deepest + 1 < self._head.shape.drafted else 0

    def root(self, count: int) -> Candidates:
        cache = self._cache
        self._prepare(cache)
        self._drop_rows()
        while self._read_chunk(cache, PREFILL_CHUNK_TOKENS):
            pass
        unread = self._unread(cache)
        self._logits = cast(torch.Tensor, self._shared.forward(cache, ForwardBatch.chain(unread)))
        cache.length += len(unread) - 1
        head, ring, start = self._head, cache.rows.hidden, cache.rows.length
        assert ring is not None
        states = ring.read(start, start + head.shape.rows)
        self._states, self._first, self._found = states[-head.shape.drafted :], 0, None
        anchor = torch.tensor(unread[-1:], dtype=torch.int64, device=states.device)
        self._memory = [head.memory(anchor, states)]
        self._rows, self._depths, self._ancestors = [int(unread[-1])], [0], np.ones((1, 1), np.bool_)
        if head.is_parallel:
            places = list(range(head.shape.drafted))
            logits, _ = head.step(self._logits, self._states, anchor, self._memory[0])
            self._found = self._candidates(logits, places, count)
        return self._after([0], count)

    def _expand(self, tokens: Collection[int], parents: Collection[int], count: int) -> Candidates:
        known = len(self._rows)
        del self._memory[known:]
        self._add_rows(tokens, parents)
        self._memory += [self._memory[parent] for parent in parents]
        return self._after(list(range(known, len(self._rows))), count)

    def advance(self, tokens: Ints) -> None:
        path = self._follow(tokens.tolist())
        self._length += len(tokens)
        if len(path) <= len(tokens):
            self._drop_rows()
            return
        self._memory = self._memory[path[-1] :]
        self._first += self._depths[path[-1]]
        self._move_root(path)

    @property
    def _head(self) -> BlockHead:
        return cast(BlockModel, self._shared.runner).block

    @torch.inference_mode()
    def _after(self, rows: list[int], count: int) -> Candidates:
        """The candidates after rows; none after those at the block's end."""
        head = self._head
        depths = [self._depths[row] for row in rows]
        last = head.shape.drafted - 1
        places = [min(self._first + depth, last) for depth in depths]
        if self._found is not None:
            q = None if self._found.q is None else self._found.q[places]
            found = Candidates(self._found.tokens[places], self._found.probability[places], q)
        else:
            states = self._states[places]
            tokens = torch.tensor([self._rows[row] for row in rows], dtype=torch.int64, device=states.device)
            memory = torch.cat([self._memory[row] for row in rows])
            logits, memory = head.step(self._logits[places], states, tokens, memory)
            for row, own in zip(rows, memory, strict=True):
                self._memory[row] = own[None]
            found = self._candidates(cast(Logits, logits), depths, count)
            sure = head.confidence(states, tokens)
            if sure is not None:
                found.probability[:, 0] = sure.float().cpu().numpy()
        found.probability[[self._first + depth > last for depth in depths]] = 0
        return found
