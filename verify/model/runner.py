"""The model runner: forwards of an unmodified transformers model over our KV cache, by the fastest backend it supports."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from typing import Literal, NamedTuple, Protocol, cast

import torch
from transformers import PreTrainedModel

from drafters.interface import MAX_NODES
from verify.errors import ModelError, first_sentence
from verify.model.attention import Attention, ShapeProbe, TorchAttention
from verify.model.batch import ForwardBatch
from verify.model.cache import MARGIN_POSITIONS, CacheShape, KVCache
from verify.model.cpu.ordered_attention import (
    AttentionInputs,
    OrderedAttention,
    RowClass,
    depth_left,
    padded,
    pieces,
)
from verify.model.cpu.packing import PackedLayer, can_pack, pack_layers, packed_layers
from verify.model.cpu.trace import has_experts, trace

log = logging.getLogger("outrider.worker")

# torch.compile on a GPU: auto = if the model can be compiled; on = an error if it cannot.
Compile = Literal["auto", "on", "off"]


class ForwardBackend(Protocol):
    """A faster forward for batches of up to MAX_NODES + 1 rows."""

    def __call__(self, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        """As `ModelRunner.forward`: logits [N - known, V], valid until the next call."""


class Mode(NamedTuple):
    """How a runner computes steps."""

    rows: RowClass | None
    inputs: AttentionInputs | None
    backend: ForwardBackend | None


class ModelRunner:
    """A loaded model and the shape of its cache. Forwards, one at a time, keep no state outside the cache passed to them."""

    def __init__(
        self,
        model: PreTrainedModel,
        context_tokens: int | None = None,
        pack: bool = False,
        traced: bool = False,
        compile: Compile = "auto",
        started: bool = True,
    ) -> None:
        """`pack`, `traced` and `compile` as in `LoadOptions`. Raises ModelError if the model cannot be served.

        Unless `started`, call `start` before any other method.
        """
        if compile == "on" and model.device.type != "cuda":
            raise ModelError("model.compile is for GPUs; on a CPU, set it to auto: packed layers and tracing replace it.")
        self.model = model.eval()
        self.weight_bytes, weights = weight_size(model)  # read by each step
        self.weight_bits = round(8 * self.weight_bytes / max(1, weights), 2)  # mean, scales included
        if pack and can_pack(model):
            pack_layers(model)
        config = model.config.get_text_config()
        self.device = model.device
        self.vocabulary = int(config.vocab_size)
        self.model_tokens = int(config.max_position_embeddings)
        self.context_tokens = min(self.model_tokens, context_tokens or self.model_tokens)
        self._traced, self._compile = traced, compile
        self._attention_probe = ShapeProbe()
        self.cache_shape = self._probe(self._attention_probe)
        self._backend: ForwardBackend | None = None
        self.row_class: RowClass | None = None  # if set, a row's logits have the same bits in every step
        self.invariance = "off"  # for people: whether `row_class` is set, and why
        self._inputs: AttentionInputs | None = None
        if started:
            self.start(self.context_tokens)

    def start(self, context_tokens: int, rows: RowClass | None = None) -> None:
        """Sets the context length, at most the model's, and builds the backend, which takes memory. Raises ModelError.

        With `rows`, steps are computed in this class, on a CPU (`verify.model.cpu.ordered_attention`).
        """
        self.context_tokens = min(self.model_tokens, context_tokens)
        self.compute_in(rows)
        if self.device.type == "cuda":
            self._backend = self._graphed(self._compile)
        elif self._traced:
            self._backend = trace(self.model, self.cache_shape, self._attention_probe, self._untraced_step, self._inputs)

    def compute_in(self, rows: RowClass | None) -> None:
        """Computes steps in this class, without a backend."""
        self.row_class, self._backend, self._inputs = rows, None, None
        if rows is not None:
            shape = self.cache_shape
            self._inputs = AttentionInputs(shape.kv_heads, shape.head_dim, self._attention_probe.groups, shape.dtype, rows)

    @property
    def backends(self) -> str:
        """What measurements depend on beside the machine and the model."""
        packed = sorted({type(layer).__name__ for layer in packed_layers(self.model)})
        return f"packed {packed}, {self.weight_bytes} bytes, traced {self._traced}, compiled {self._compile}"

    @property
    def mode(self) -> Mode:
        """How steps are computed, to return to it with `use`."""
        return Mode(self.row_class, self._inputs, self._backend)

    def use(self, mode: Mode) -> None:
        """Computes steps as when `mode` was read."""
        self.row_class, self._inputs, self._backend = mode

    def draft_depth(self, length: int) -> int:
        """The deepest node that a draft may have, after `length` tokens in the cache."""
        return MAX_NODES if self.row_class is None else depth_left(length)

    def _graphed(self, compile: Compile) -> ForwardBackend:
        """CUDA graphs, or the same kernels launched one by one if the model cannot be captured."""
        from verify.model.gpu.graphs import CompileError, GraphedForward, compiled_layers  # Triton is only needed on a GPU

        graphed = GraphedForward(partial(self._run, keep=0), self.cache_shape, self._positions)
        if has_experts(self.model):
            return graphed
        try:
            with nullcontext() if compile == "off" else compiled_layers(self.model):
                graphed.capture(self.new_cache())
        except CompileError as error:
            if compile == "on":
                raise ModelError(
                    f"torch.compile failed for this model; set model.compile to auto or off: {first_sentence(error)}"
                ) from None
            log.warning("torch.compile failed for this model, so its steps are slower: %s", first_sentence(error))
            graphed.capture(self.new_cache())
        return graphed

    def _probe(self, probe: ShapeProbe) -> CacheShape:
        """The cache shape, determined by a forward of one token. Raises ModelError."""
        try:
            token = torch.zeros(1, dtype=torch.long, device=self.device)
            self._run(token, token, probe, keep=1)
        except (ValueError, TypeError) as error:
            raise ModelError(f"This model cannot be served: {first_sentence(error)}") from None
        shapes = {shape for pair in probe.shapes.values() for shape in pair}
        if len(shapes) != 1 or set(probe.shapes) != set(range(len(probe.shapes))):
            raise ModelError("This model cannot be served: keys and values must have the same shape in all layers.")
        kv_heads, _, head_dim = shapes.pop()
        return CacheShape(len(probe.shapes), kv_heads, head_dim, self.model.dtype, self.device)

    @property
    def _positions(self) -> int:
        """Positions of a slot."""
        return self.context_tokens + MARGIN_POSITIONS

    def new_cache(self) -> KVCache:
        """An empty cache for a full context."""
        return KVCache(self.cache_shape, self._positions)

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> torch.Tensor:
        """Runs the batch after the cache's committed tokens and writes the rows' keys and values; commits nothing.

        Returns logits [N - known, V] on the model's device, valid until the next forward; without `logits`, only those of
        the last row, [1, V].
        """
        if not logits or len(batch) > MAX_NODES + 1:
            return self._untraced(cache, batch, TorchAttention(cache, batch), keep=0 if logits else 1)
        if self.row_class is None:
            return self._step(cache, batch)
        parts = [
            self._step(cache, padded(part, self.row_class.low))[: len(part) - part.known]
            for part in pieces(batch, cache.length, self.row_class)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _step(self, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        step = self._untraced_step if self._backend is None else self._backend
        return step(cache, batch)

    def _untraced_step(self, cache: KVCache, batch: ForwardBatch) -> torch.Tensor:
        in_order = self._inputs and OrderedAttention(cache, batch, self._inputs)
        return self._untraced(cache, batch, in_order or TorchAttention(cache, batch), keep=0)

    def _untraced(self, cache: KVCache, batch: ForwardBatch, attention: Attention, keep: int) -> torch.Tensor:
        tokens = batch.tokens[batch.known :].to(self.device)
        positions = batch.positions(cache.length).to(self.device)
        return self._run(tokens, positions, attention, keep)

    @torch.inference_mode()
    def _run(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, keep: int) -> torch.Tensor:
        """The model's forward; logits of the last `keep` rows, or of all rows if it is 0."""
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            attention=attention,
        )
        return cast(torch.Tensor, output.logits[0])


def weight_size(model: PreTrainedModel) -> tuple[int, int]:
    """Bytes and number of the weights that a step reads: all but the embedding table, unless the head shares it."""
    parameters = list(model.parameters())  # without repetitions
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if isinstance(head, PackedLayer) or table is not head.weight:
        parameters = [parameter for parameter in parameters if parameter is not table]
    layers = packed_layers(model)
    size = sum(map(stored_bytes, parameters)) + sum(layer.nbytes for layer in layers)
    return size, sum(map(torch.numel, parameters)) + sum(layer.in_features * layer.out_features for layer in layers)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor; of a quantised one, those of its parts."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.nbytes
    return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
