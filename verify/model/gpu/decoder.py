"""The forward of a decoder of Llama's kind in seven launches a layer, over the weights of a model of transformers.

A norm costs no launch: who writes the residual also writes it times the norm's gain, and parts of its sums of squares, by which
the next product divides its outputs. Queries and keys are rotated where keys are written, and gates and values become one
number where they are computed. All kernels give a row the same bits in any number of rows.

Takes decoders that norm with RMS before attention and before a feed-forward part of gates and values, and add both to the
residual: Llama, Mistral, Qwen2, Qwen3 and others; transformers' own forward computes all other models.
"""

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from transformers import PreTrainedModel

from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.description import Activation, Architecture, Layer, Norm
from outrider.verify.model.attention.interface import Layer as CacheLayer
from outrider.verify.model.gpu.devices import Crossings
from outrider.verify.model.gpu.exchange import Exchange, add_parts, await_ranks, begin_again, exchanges, publish
from outrider.verify.model.gpu.projections import MergedLinear
from outrider.verify.model.gpu.split_linear import SplitLinear
from outrider.verify.model.gpu.text_work import ROWS
from outrider.verify.model.gpu.triton_attention import KernelAttention, Rotation
from outrider.verify.model.gpu.triton_products import SUMMED, TYPES, Weights, embed, linear, linear_residual
from outrider.verify.model.hidden_states import HiddenTap
from outrider.verify.model.recurrent.rows import Recurrence

# The names of a layer's modules in transformers.
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION, OPTIONAL = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"q_norm", "k_norm"}
FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# The positions whose angles are computed at once.
ANGLES = 8192
# The residual, and what the next product takes of it, as `linear_residual` returns them.
States: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class LayerWeights(NamedTuple):
    """One layer."""

    attention: CacheLayer
    rotates: bool
    gains: tuple[torch.Tensor | None, torch.Tensor | None]  # of the norms of query and key heads
    qkv: Weights
    o: Weights
    norm: torch.Tensor  # before the feed-forward part
    gate_up: Weights  # outputs take turns
    down: Weights


class Shared(NamedTuple):
    """What a rank needs of the others."""

    exchange: Exchange
    logits: torch.Tensor  # [ROWS, vocabulary], on the first rank
    first: int  # of the rank's part of the vocabulary
    splits: tuple[int, int]  # of the sums of `o` and `down`, of all ranks
    room: int  # the most numbers of their parts


class Decoder:
    """A model's forward, or a rank's part of it. Implements `outrider.verify.model.gpu.graphs.Forward`."""

    def __init__(
        self,
        model: PreTrainedModel,
        architecture: Architecture,
        angles: torch.Tensor,
        tap: HiddenTap | None,
        shared: Shared | None = None,
    ) -> None:
        """`angles` as in `Rotation`. Use `decoder_of`."""
        decoder, head, rank = cast(Any, model.get_decoder()), model.get_output_embeddings(), 0
        self._shared, self.device = shared, angles.device
        if shared is not None:
            rank = shared.exchange.rank
            self.device = shared.exchange.mailbox.device
        layers = [(module, architecture.layers[module.self_attn.layer_idx]) for module in decoder.layers]
        self._layers = [
            layer_weights(module, layer, number + rank * len(layers), rank, self.device)
            for number, (module, layer) in enumerate(layers)
        ]
        gains = [module.input_layernorm.weight for module, _ in layers] + [decoder.norm.weight]
        self._gains = [each.to(self.device) for each in gains]
        self._table = head.tables[rank] if isinstance(head, SplitLinear) else decoder.embed_tokens.weight
        self._angles = angles.to(self.device)
        self._head, self._epsilon, self._tap = weights_of(head, rank), architecture.epsilon, tap

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: KernelAttention, *, recurrence: Recurrence | None
    ) -> torch.Tensor:
        """Tokens and positions, int64 [N], to logits [N, V]."""
        steps = self.steps(tokens, positions, attention)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return cast(torch.Tensor, end.value)

    def steps(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: KernelAttention
    ) -> Generator[None, None, torch.Tensor]:
        """The same, which stops after each part that it has sent to the other ranks."""
        epsilon, residuals = self._epsilon, []
        residual, rows, sums = embed(tokens, self._table, self._gains[0])
        for layer, gain in zip(self._layers, self._gains[1:], strict=True):
            residuals.append(residual)
            states = linear(rows, *layer.qkv, sums, epsilon)
            rotation = Rotation(self._angles, positions, *layer.gains, epsilon) if layer.rotates else None
            attended = attention.attend_states(layer.attention, states, rotation)
            residual, rows, sums = yield from self._added(0, attended, layer.o, residual, layer.norm)
            gated = linear(rows, *layer.gate_up, sums, epsilon, True)
            residual, rows, sums = yield from self._added(1, gated, layer.down, residual, gain)
        if self._tap is not None:
            self._tap.put([residuals[index] for index in self._tap.layers] or [normed(rows, sums, epsilon)])
        if self._shared is None:
            return cast(torch.Tensor, linear(rows, *self._head, sums, epsilon))
        # The last forward's logits have been read: the first rank has sent parts of this one since, for which others waited.
        exchange, logits = self._shared.exchange, self._shared.logits
        publish(rows, *self._head, *exchange, self._shared.first, logits.shape[1], sums, epsilon)
        yield
        await_ranks(*exchange)
        return logits[: len(tokens)]

    def _added(
        self, which: int, rows: torch.Tensor, weights: Weights, residual: torch.Tensor, gain: torch.Tensor
    ) -> Generator[None, None, States]:
        """`linear_residual` with the inputs of all ranks."""
        if self._shared is None:
            return cast(States, linear_residual(rows, *weights, residual, gain))
        exchange, splits, room = self._shared.exchange, self._shared.splits[which], self._shared.room
        ranks = len(exchange.mailboxes) - 1
        publish(rows, *weights, *exchange, splits // ranks * exchange.rank, room)
        yield
        return cast(States, add_parts(residual, gain, weights.bias, *exchange, splits, room))


class TensorParallel:
    """The forward of several ranks. Implements `outrider.verify.model.gpu.graphs.Forward`."""

    def __init__(self, ranks: Sequence[Decoder], shared: Sequence[Shared], crossings: Crossings) -> None:
        self._ranks, self._exchanges, self._crossings = ranks, [each.exchange for each in shared], crossings

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: KernelAttention, *, recurrence: Recurrence | None
    ) -> torch.Tensor:
        """See `Decoder`. No rank waits for what another one has yet to launch, unless a graph of its own is captured."""
        count = len(tokens)
        forwards = []
        for rank in self._ranks:
            rows = attention.rows[rank.device]
            forwards.append((rank.device, rank.steps(rows.tokens[:count], rows.positions[:count], attention)))
        try:
            return self._advanced(forwards)
        except Exception:
            if self._crossings.recorder is None:
                begin_again(self._exchanges)
            raise

    def _advanced(self, forwards: list[tuple[torch.device, Generator[None, None, torch.Tensor]]]) -> torch.Tensor:
        recorder, logits = self._crossings.recorder, list[torch.Tensor]()
        apart = recorder is not None and self._crossings.first.type == "cuda"
        while forwards:
            for each in tuple(forwards):
                device, steps = each
                if recorder is not None:
                    recorder.turn(device)
                try:
                    next(steps)
                    while apart:
                        next(steps)
                except StopIteration as end:
                    logits.append(end.value)
                    forwards.remove(each)
        return logits[0]


def decoder_of(
    model: PreTrainedModel, positions: int, tap: HiddenTap | None = None, crossings: Crossings | None = None
) -> Decoder | TensorParallel | None:
    """The forward of the model over caches of up to `positions`; None if its architecture has other parts, or other weights.

    That of a split model needs its `crossings`.
    """
    head = model.get_output_embeddings()
    is_split = isinstance(head, SplitLinear)
    if model.dtype not in TYPES or (not is_split and len({tensor.device for tensor in model.parameters()}) > 1):
        return None
    architecture = read_config(model.config.to_dict())
    decoder: Any = model.get_decoder()
    if architecture is None or not is_plain(architecture) or not all(has_parts(layer) for layer in decoder.layers):
        return None
    if not hasattr(head, "weights"):
        return None
    angles = angles_of(decoder, positions)
    if not isinstance(head, SplitLinear) or crossings is None:
        return Decoder(model, architecture, angles, tap)
    ranks = ranks_of(model, architecture, head)
    decoders = [Decoder(model, architecture, angles, None if rank else tap, each) for rank, each in enumerate(ranks)]
    return TensorParallel(decoders, ranks, crossings)


def ranks_of(model: PreTrainedModel, architecture: Architecture, head: SplitLinear) -> list[Shared]:
    layer: Any = cast(Any, model.get_decoder()).layers[0]
    splits = layer.self_attn.o_proj.splits, layer.mlp.down_proj.splits
    vocabulary, room = sum(len(own) for [own] in head.places), max(splits) * ROWS[-1] * architecture.hidden
    logits = torch.empty(ROWS[-1], vocabulary, dtype=model.dtype, device=head.devices[0])
    found = exchanges(head.devices, room, logits)
    return [Shared(each, logits, own.start, splits, room) for each, [own] in zip(found, head.places, strict=True)]


def is_plain(architecture: Architecture) -> bool:
    """Whether a decoder has nothing but what `Decoder` computes."""
    scales = architecture.embedding_scale, architecture.residual_scale, architecture.logit_scale
    others = architecture.mixture, architecture.logit_cap, architecture.embedding_width, architecture.residuals
    is_other = architecture.is_parallel or architecture.has_pairs or architecture.norms_less_one
    return (
        architecture.norm is Norm.RMS
        and architecture.activation is Activation.SILU
        and architecture.hidden % SUMMED == 0
        and set(scales) == {1.0}
        and not any((*others, is_other, architecture.multipliers))
        and len(architecture.rotaries) <= 1
        and len({(each.heads, each.kv_heads, each.head_dim) for each in architecture.layers}) == 1
        and all(is_plain_layer(each) for each in architecture.layers)
    )


def is_plain_layer(layer: Layer) -> bool:
    others = layer.cap, layer.latent, layer.source, layer.recurrence
    is_other = layer.is_gated or layer.norms_values or layer.deviations != -math.inf
    return layer.heads > 0 and layer.feeds and not is_other and all(each is None for each in others)


def has_parts(layer: Any) -> bool:
    """Whether a module has the parts of a layer of `Decoder`, and its weights are of the kinds that our kernels take."""
    if {name for name, _ in layer.named_children()} != LAYER:
        return False
    attention, feed_forward = (dict(each.named_children()) for each in (layer.self_attn, layer.mlp))
    if not ATTENTION <= set(attention) <= ATTENTION | OPTIONAL or set(feed_forward) != FEED_FORWARD:
        return False
    merged = attention["q_proj"], feed_forward["gate_proj"]
    if layer.self_attn._parameters or not all(isinstance(each, MergedLinear) for each in merged):
        return False
    gains = [attention[name].weight.shape[0] for name in OPTIONAL & set(attention)]
    products = [*(each.product for each in merged), attention["o_proj"], feed_forward["down_proj"]]
    return {*gains} <= {layer.self_attn.head_dim} and all(hasattr(each, "weights") for each in products)


def weights_of(layer: Any, rank: int) -> Weights:
    return cast(Weights, layer.weights(rank) if isinstance(layer, SplitLinear) else layer.weights)


def layer_weights(module: Any, layer: Layer, number: int, rank: int, device: torch.device) -> LayerWeights:
    """A rank's weights; `number` is that of the layer in the caches."""
    attention, feed_forward = module.self_attn, module.mlp
    gains = [getattr(getattr(attention, name, None), "weight", None) for name in ("q_norm", "k_norm")]
    query, key = (None if gain is None else gain.to(device) for gain in gains)
    return LayerWeights(
        CacheLayer(number, layer.scaling, layer.window),
        layer.rotary is not None,
        (query, key),
        weights_of(attention.q_proj.product, rank),
        weights_of(attention.o_proj, rank),
        module.post_attention_layernorm.weight.to(device),
        weights_of(feed_forward.gate_proj.product, rank),
        weights_of(feed_forward.down_proj, rank),
    )


@torch.inference_mode()
def angles_of(decoder: Any, positions: int) -> torch.Tensor:
    """The model's own cosines and sines of all positions, float32 [positions, rotary_dim]."""
    rows = torch.empty(0, dtype=torch.float32, device=decoder.norm.weight.device)

    def some(first: int) -> torch.Tensor:
        at = torch.arange(first, min(first + ANGLES, positions), device=rows.device)
        parts: Sequence[torch.Tensor] = decoder.rotary_emb(rows, at[None])
        return torch.cat([each[0, :, : each.shape[2] // 2].float() for each in parts], 1)

    return torch.cat([some(first) for first in range(0, positions, ANGLES)])


def normed(rows: torch.Tensor, sums: torch.Tensor, epsilon: float) -> torch.Tensor:
    """The residual normed, of what `linear` takes of it."""
    mean = sums.sum(1, keepdim=True) / rows.shape[1]
    return (rows.float() * torch.rsqrt(mean + epsilon)).to(rows.dtype)
