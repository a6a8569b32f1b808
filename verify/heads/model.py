"""A draft head with the target that it reads, called like a model: forwards over a cache of its own."""

from __future__ import annotations

from typing import Any, cast

import torch

from outrider.drafters.interface import MAX_NODES
from outrider.verify.heads.networks import Head
from outrider.verify.model.attention.shape_probe import ShapeProbe
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS
from outrider.verify.model.cache.paging import Rows
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.cpu.choose import can_pack, pack_layers
from outrider.verify.model.hidden.ring import StateRing
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import to_device

# The head's own states cover the rows that are being drafted and as many rows before them.
OWN_POSITIONS = 2 * (MAX_NODES + 1)


class HeadCache(TensorCache):
    """The head's keys and values of a text, from `first` on, and its own states (`hidden`) of the last rows."""

    def __init__(self, shape: CacheShape, positions: int) -> None:
        super().__init__(shape, positions)
        self.source: StateRing | None = None  # the target's states of the text
        self.first = 0  # rows before it are absent: the target's states that they read were not kept
        self.exact = 0  # rows before it read the target's states; later ones the head's own

    def skip(self, length: int) -> None:
        """Takes `length` positions to be committed, without their rows."""
        self.length = self.first = self.exact = length

    @property
    def visible(self) -> int:
        """The committed rows that attention sees: those from `first` on."""
        return self.length - self.first

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, known: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """As `TensorCache.write`, without absent rows."""
        keys, values = super().write(layer, key, value, known)
        return keys[:, self.first :], values[:, self.first :]

    def truncate(self, length: int) -> None:
        """Drops all positions from `length` on."""
        super().truncate(length)
        self.first, self.exact = min(self.first, self.length), min(self.exact, self.length)

    def fork(self, source: Rows, length: int) -> None:
        """As `TensorCache.fork`."""
        super().fork(source, length)
        assert isinstance(source, HeadCache)
        self.first, self.exact = min(source.first, self.length), min(source.exact, self.length)


class HeadModel:
    """A head on its target's device. Has the part of TorchRunner's interface that `outrider.verify.draft_model` uses."""

    is_head = True

    def __init__(self, head: Head, target: TorchRunner, pack: bool = True) -> None:
        """Makes the target, which has not started, keep the hidden states that the head reads. `pack` as in LoadOptions."""
        module = cast(torch.nn.Module, head).to(target.device).eval().requires_grad_(False)
        for parameter in module.parameters():  # buffers are left out, because rotary embeddings stay in float32
            parameter.data = parameter.data.to(target.model.dtype)
        if pack and can_pack(target.model):
            pack_layers(module, target.findings)
        self.head = head
        self.device, self.vocabulary = target.device, target.vocabulary
        self.context_tokens = target.context_tokens
        self._products = target.products
        self._embed = target.model.get_input_embeddings()
        lm_head = cast(Any, target.model.get_output_embeddings())
        self._lm_head = lm_head.apart() if hasattr(lm_head, "apart") else lm_head  # the head may run beside the target
        self._width = target.tap_hidden(head.layers_read)
        probe, token = ShapeProbe(), torch.zeros(1, dtype=torch.int64)
        with torch.inference_mode():
            self._advance(token, token, self._fused(torch.zeros(1, self._width)), probe)
        self.cache_shape = CacheShape(
            probe.layers, target.model.dtype, self.device, hidden_width=head.size, hidden_positions=OWN_POSITIONS
        )

    def start(self, context_tokens: int) -> None:
        """Sets the context length: the target's."""
        self.context_tokens = context_tokens

    def new_cache(self) -> HeadCache:
        """An empty cache for a full context."""
        return HeadCache(self.cache_shape, self.context_tokens + MARGIN_POSITIONS)

    @torch.inference_mode()
    def forward(self, cache: TensorCache, batch: ForwardBatch, logits: bool = True) -> torch.Tensor:
        """As `TorchRunner.forward`. Rows without known ones are committed tokens, which read the target's states.

        Other rows read the head's own state of the row above them.
        """
        assert isinstance(cache, HeadCache) and cache.hidden is not None
        start, known = cache.length, batch.known
        if known:
            states = cache.hidden.take(start + parents(batch))
        else:
            end = start + len(batch) - 1
            kept = torch.zeros(end - start + 1, self._width) if cache.source is None else cache.source.read(start - 1, end)
            states = self._fused(kept)
        tokens, positions = torch.from_numpy(batch.tokens[known:]), torch.from_numpy(batch.positions(start))
        own = self._advance(tokens, positions, states, TorchAttention(cache, batch, self._products))
        cache.hidden.write(start + known, own)
        return self.head.logits(own[None] if logits else own[None, -1:], self._lm_head)[0]

    def _fused(self, states: torch.Tensor) -> torch.Tensor:
        return self.head.fuse(to_device(states, self.device).to(self._embed.weight.dtype)[None])[0]

    def _advance(self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, attention: Any) -> torch.Tensor:
        """The own states of rows with these tokens, positions and states before them, [N, size]."""
        embedded = self._embed(to_device(tokens, self.device)[None])
        others = {"attention": attention, "attention_mask": None}
        return self.head.advance(embedded, states[None], to_device(positions, self.device)[None], **others)[0]


def parents(batch: ForwardBatch) -> torch.Tensor:
    """The row above each row that is computed, int64 [N - known]."""
    above = batch.ancestor_mask() & (batch.depths[None, :] == batch.depths[:, None] - 1)
    return torch.from_numpy(above[batch.known :].argmax(1))
