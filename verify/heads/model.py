"""A draft head with the target that it reads, called like a model: forwards over a cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from outrider.drafters.interface import MAX_NODES
from outrider.drafters.model.language_model import Candidates
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.session import SessionDraft
from outrider.verify.errors import ModelError
from outrider.verify.heads.networks import Head
from outrider.verify.model.attention.interface import Attention, ShapeProbe, number_layers
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch, Segment, keep_hidden
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS, KVCache, Rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cpu.native.layers import pack_layers
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.gpu.devices import Crossings
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool, unplanned_pages
from outrider.verify.model.gpu.split_linear import INSTEAD, SplitLinear
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.hidden_states import StateRing
from outrider.verify.model.loading import fix_rope
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import to_device
from outrider.verify.verifier import CachedText

if TYPE_CHECKING:
    from outrider.verify.model.gpu.graphs import GraphedForward

# What has hidden states.
Target = NativeRunner | TorchRunner
# The head's own states cover the rows that are being drafted and as many rows before them.
OWN_POSITIONS = 2 * (MAX_NODES + 1)
# More rows, those of a prompt, are not computed by captured graphs.
MOST_ROWS = 72


class HeadCache(KVCache):
    """The head's keys and values of a text from `first` on, in `rows`, and its own states of the last of them."""

    lag = 1  # positions between a row and the state that it reads

    def __init__(self, rows: TensorCache, before: HeadCache | None = None) -> None:
        """`before` is the cache of the head whose states are read; None = those of the target."""
        self.rows, self.positions, self.before = rows, rows.positions, before
        self.pages = []
        self.source: StateRing | None = None  # the target's states of the text
        self.first = 0  # rows before it are absent: the target's states that they read were not kept
        self.exact = 0  # rows before it read the target's states; later ones the head's own

    @property
    def heads(self) -> Sequence[HeadCache]:
        """The caches of all heads that draft in turns, from the first on."""
        return (self,)

    @property
    def length(self) -> int:
        """The text's committed tokens, with those whose rows are absent."""
        return self.first + self.rows.length

    @length.setter
    def length(self, length: int) -> None:
        for each in self.heads:
            each.rows.length = max(0, length - each.first)

    def skip(self, length: int) -> None:
        """Takes `length` positions to be committed, without their rows."""
        self.rows.truncate(0)
        self.first = self.exact = length

    def prepare(self, target: KVCache | None, last: int) -> None:
        """Before tokens up to the position `last` are read, with the target's states: skips rows whose states are not kept."""
        source = self.source = None if target is None else target.hidden
        oldest = last  # it is always read
        if source is not None and source.end >= oldest:
            oldest = min(oldest, source.first + self.lag)
        if self.length < oldest:
            self.skip(oldest)

    def settle(self) -> None:
        """Marks the rows up to row 0 of the tree as having read the target's states."""
        for each in self.heads:
            each.exact = each.length + 1

    def cut(self, length: int) -> None:
        """`truncate` of this head alone."""
        self.rows.truncate(max(0, length - self.first))
        self.first = min(self.first, length)
        self.exact = min(self.exact, self.length)

    def truncate(self, length: int) -> None:
        for each in self.heads:
            each.cut(length)

    def commit(self, rows: list[int]) -> None:
        for each in self.heads:
            each.rows.commit(rows)

    def fork(self, source: Rows, length: int) -> None:
        assert isinstance(source, HeadCache)
        for own, each in zip(self.heads, source.heads, strict=True):
            own.rows.fork(each.rows, max(0, length - each.first))
            own.first = min(each.first, length)
            own.exact = min(each.exact, own.length)

    def fill(self, length: int, noise: Any = None) -> None:
        for each in self.heads:
            each.first = 0
            each.rows.fill(length, noise)

    def assume(self, length: int) -> None:
        for each in self.heads:
            each.first = 0
            each.rows.assume(length)

    def missing_pages(self, rows: int) -> int:
        return sum(each.rows.missing_pages(rows) for each in self.heads)


class HeadModel:
    """A head on its target's device. Has the part of TorchRunner's interface that `outrider.verify.draft_model` uses.

    On a GPU, its caches are in pages, and few rows are computed by captured graphs, as its target's are.
    """

    pages: int | None = None  # see `ModelRunner`
    drafted = 1  # tokens of a forward
    own_positions = OWN_POSITIONS  # states of its own that are kept

    def __init__(self, head: Head, target: Target, pack: bool = True) -> None:
        """Makes the target, which has not started, keep the hidden states that the head reads. `pack` as in LoadOptions."""
        device = torch.device(str(target.device))
        module = head.to(device).eval().requires_grad_(False)
        for parameter in module.parameters():  # buffers are left out, because rotary embeddings stay in float32
            parameter.data = parameter.data.to(target.dtype)
        if pack:
            pack_layers(module)
        self.head, self._target = head, target
        self.description = repr(module)
        self.device, self.vocabulary, self._dtype = device, target.vocabulary, target.dtype
        self.context_tokens = target.context_tokens
        fix_rope(module, self.device, self.context_tokens)
        self.in_pages = target.in_pages
        self._embed = target.embed_tokens
        lm_head = cast(Any, target.lm_head)
        if isinstance(lm_head, SplitLinear):
            raise ModelError(f"Draft heads need the target's whole vocabulary on a GPU; {INSTEAD}.")
        self._lm_head = lm_head.apart() if hasattr(lm_head, "apart") else lm_head  # the head may run beside the target
        self._width = self._tap(target)
        probe = self._probe()
        number_layers(module, probe.numbers)
        self._groups = probe.groups
        self._pool: PagePool | None = None
        self._graphed: GraphedForward | None = None
        self.cache_shape = self._own_shape = CacheShape(
            probe.layers, target.dtype, self.device, hidden_width=head.size, hidden_positions=self.own_positions
        )

    def _tap(self, target: Target) -> int:
        """Makes the target keep the states that the head reads; returns their width."""
        return target.tap_hidden(self.head.layers_read)

    @torch.inference_mode()
    def _probe(self) -> ShapeProbe:
        """The shapes of the head's layers, by a forward of one token."""
        probe, token = ShapeProbe(), torch.zeros(1, dtype=torch.int64)
        self._advance(token, token, self._fused(torch.zeros(1, self._width)), probe)
        return probe

    def start(self, context_tokens: int) -> None:
        """Sets the context length: the target's."""
        self.context_tokens = context_tokens
        if self.in_pages:
            self._pool = PagePool(self._own_shape, self.pages or unplanned_pages(self._own_shape, self._positions))
            self._capture(self._pool)

    def _capture(self, pool: PagePool) -> None:
        """Captures the forwards of few rows."""
        from outrider.verify.model.gpu.graphs import GraphedForward, can_capture  # Triton is only needed on a GPU
        from outrider.verify.model.gpu.triton_products import counters_of

        head = self.head
        crossings, few = Crossings(head, self.device), [count for count in ROWS if count <= MOST_ROWS]
        self._graphed = GraphedForward(self._captured, pool, self._positions, self._groups, few, self, crossings)
        self._inputs = torch.zeros(self._graphed.max_rows, self.head.size, dtype=self._dtype, device=self.device)
        if self.device.type == "cuda" and can_capture(head, cast(TorchRunner, self._target).model):
            self._graphed.counters = counters_of(head, self._lm_head)
            self._graphed.capture()

    @property
    def _positions(self) -> int:
        return self.context_tokens + MARGIN_POSITIONS

    def new_cache(self) -> HeadCache:
        return HeadCache(self._new_rows())

    def new_session(self, shared: DraftRunner) -> SessionDraft:
        return HeadDraft(shared)

    def _new_rows(self) -> TensorCache:
        if self._pool is not None:
            return PagedCache(self._pool, self._positions)
        return TensorCache(self._own_shape, self._positions)

    @torch.inference_mode()
    def forward(self, cache: HeadCache, batch: ForwardBatch, logits: bool | None = True) -> torch.Tensor:
        """See `ModelRunner.forward`. Without known rows, rows are committed tokens, which read the target's states.

        Other rows read the head's own state of the row above them. Without logits (None), it returns the rows' own states.
        """
        segment = Segment(cache.rows, batch, bool(logits), shift=-cache.first)
        cache.rows.reserve(len(batch))
        states = self._states_before(cache, batch)
        if self._graphed is not None and len(states) <= self._graphed.max_rows:
            self._inputs[: len(states)] = states
            return self._graphed([segment])
        tokens, positions = torch.from_numpy(batch.tokens[batch.known :]), torch.from_numpy(batch.positions(cache.length))
        own = self._advance(tokens, positions, states, self._attention(cache, batch))
        keep_hidden(own, [segment])
        return own if logits is None else self.head.logits(own[None] if logits else own[None, -1:], self._lm_head)[0]

    def _attention(self, cache: HeadCache, batch: ForwardBatch) -> Attention:
        return TorchAttention(cache.rows, batch)

    def _states_before(self, cache: HeadCache, batch: ForwardBatch) -> torch.Tensor:
        """The state that each row reads, [N, size]."""
        if batch.known:
            assert cache.rows.hidden is not None
            cache.rows.hidden.wait()
            return cache.rows.hidden.take(cache.rows.length + parents(batch))
        start, end = cache.length, cache.length + len(batch) - 1
        if cache.source is None:
            return self._fused(torch.zeros(len(batch), self._width))
        cache.source.wait()
        return self._fused(cache.source.read(start - 1, end))

    def _captured(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Any, *, recurrence: Any) -> torch.Tensor:
        """The logits of rows that read the states in `_inputs`. Implements `outrider.verify.model.gpu.graphs.Forward`."""
        self.states = self._advance(tokens, positions, self._inputs[: len(tokens)], attention)
        return self.head.logits(self.states[None], self._lm_head)[0]

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(to_device(states, self.device).to(self._dtype)[None])[0]

    def _advance(self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, attention: Any) -> torch.Tensor:
        """The own states of rows with these tokens, positions and states before them, [N, size]."""
        embedded = self._embed(to_device(tokens, self.device)[None])
        others = {"attention": attention, "attention_mask": None}
        return self.head.advance(embedded, states[None], to_device(positions, self.device)[None], **others)[0]


def parents(batch: ForwardBatch) -> torch.Tensor:
    """The known row above each row that is computed, int64 [N - known]."""
    above = batch.ancestor_mask() & (batch.depths[None, :] == batch.depths[:, None] - 1)
    found = above[batch.known :].argmax(1)
    assert (found < batch.known).all(), "a row reads a state that the same forward computes"
    return torch.from_numpy(found)


class HeadRunner(DraftRunner):
    def __init__(self, head: HeadModel, slots: int = 4) -> None:
        super().__init__(cast(ModelRunner, head), head.vocabulary, slots)
        self.pair.block = head.drafted

    def session(self) -> SessionDraft:
        return cast(HeadModel, self.runner).new_session(self)


class HeadSession(SessionDraft):
    """A session whose cache is told where the target's states of its text are."""

    is_sequential = True
    _shared: HeadRunner

    @property
    def _cache(self) -> HeadCache:
        return cast(HeadCache, self._shared.cache_for(self))

    def _prepare(self, cache: HeadCache) -> None:
        """Before the text up to its last token is read."""
        cache.prepare(self._text.cache if isinstance(self._text, CachedText) else None, self._length - 1)
        if cache.length < self._text.prompt_length - 1:
            self._shared.synchronize()  # unlike a step, reading a prompt does not wait for the device


class HeadDraft(HeadSession):
    """One session's draft head. Implements `outrider.drafters.model.language_model.LanguageModel`."""

    @property
    def unread(self) -> int:
        return 1  # it reads states that the target has computed, with the next draft

    def read(self, tokens: int) -> int:
        return 0

    def root(self, count: int) -> Candidates:
        cache = self._cache
        cache.truncate(cache.exact)  # the target has now computed the states of rows that read the head's own
        self._prepare(cache)
        found = super().root(count)
        cache.settle()
        return found
