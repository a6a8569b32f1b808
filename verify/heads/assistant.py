"""Assistants of Gemma 4: draft heads that attend to the target's keys and values, and have none of their own.

A row has its token's embedding and the state before it, as in other heads. From the position of the text's last token, whatever
its depth, it attends to what the target has computed: in layers with a window, to the target's last layer that has one, and in
others to its last layer without. Parameters have the names of the published checkpoints, without their prefixes.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import AutoConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm, Gemma4TextDecoderLayer, Gemma4TextRotaryEmbedding

from outrider.verify.heads.model import HeadCache, HeadModel, Target
from outrider.verify.heads.networks import Head
from outrider.verify.model.architecture.standard import FULL, SLIDING
from outrider.verify.model.attention.interface import NAME, Attention, Layer, ShapeProbe
from outrider.verify.model.attention.torch_attention import attend
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.codec import decode
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.cache.shape import LayerShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.transfer import tensor_of

Shared = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values by kind of layer, [kv_heads, L, head_dim]


class AssistantHead(Head):
    """An assistant. Its own states are those for the next row, followed by those that logits are computed from."""

    def __init__(self, config: Any, width: int, scale: float, clusters: tuple[int, int] | None) -> None:
        """The target's states have `width` values, and its embeddings lack the factor `scale`.

        `clusters` are their number and how many a row chooses: tokens of others have no logits. None = there are none.
        """
        super().__init__()
        hidden, vocabulary = int(config.hidden_size), int(config.vocab_size)
        self.size, self._width, self._scale, self._clusters = width + hidden, width, scale, clusters
        self.vocabulary, self._kinds = vocabulary, list(config.layer_types)
        self.key_dims = {kind: int(config.per_layer_config[index].head_dim) for index, kind in enumerate(self._kinds)}
        self.pre_projection = torch.nn.Linear(2 * width, hidden, bias=False)
        self.layers = torch.nn.ModuleList(Gemma4TextDecoderLayer(config, index) for index in range(len(self._kinds)))
        self.norm = Gemma4RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary = Gemma4TextRotaryEmbedding(config)
        self.post_projection = torch.nn.Linear(hidden, width, bias=False)
        if clusters is None:
            self.embed_tokens: torch.nn.Module = torch.nn.Linear(hidden, vocabulary, bias=False)
        else:
            self.embed_tokens = torch.nn.Embedding(vocabulary, hidden)
            self.centroids = torch.nn.Linear(hidden, clusters[0], bias=False)
            self.register_buffer("token_ordering", torch.zeros(vocabulary, dtype=torch.int64))  # by cluster

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return pad(states, (0, self.size - self._width))

    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        rows = self.pre_projection(torch.cat([embedded * self._scale, states[..., : self._width]], -1))
        rotations = {kind: self.rotary(rows, positions, kind) for kind in set(self._kinds)}
        shared = {kind: (keys[None], values[None]) for kind, (keys, values) in others["attention"].shared.items()}
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            rows = layer(rows, position_embeddings=rotations[kind], shared_kv_states=shared, **others)
        rows = self.norm(rows)
        return torch.cat([self.post_projection(rows), rows], -1)

    def logits(self, states: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
        rows = states[..., self._width :]
        if self._clusters is None:
            return cast(torch.Tensor, self.embed_tokens(rows))
        count, chosen = self._clusters
        best = self.centroids(rows).topk(chosen).indices
        tokens = cast(torch.Tensor, self.token_ordering).view(count, -1)[best].flatten(-2)  # [1, N, candidates]
        found = (self.embed_tokens(tokens) @ rows[..., None])[..., 0]
        none = found.new_full((*rows.shape[:2], self.vocabulary), -torch.inf)
        return cast(torch.Tensor, none.scatter(-1, tokens, found))


class SharedAttention:
    """Attention to the keys and values of a target. Implements `Attention`."""

    def __init__(self, shared: Shared, position: int) -> None:
        """All rows are at `position`."""
        self.shared, self.position = shared, position

    def attend(self, layer: Layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if layer.window is not None:  # in transformers' module, a window has one key more than its size
            key, value = key[:, -layer.window - 1 :], value[:, -layer.window - 1 :]
        return attend(layer, query.to(key.dtype), key, value).to(query.dtype)


class AssistantCache(HeadCache):
    """The own states of the rows that are being drafted, and the target's keys and values before them."""

    def __init__(self, rows: TensorCache, layers: Mapping[str, tuple[int, LayerShape]], dtype: torch.dtype) -> None:
        """`layers` are those of the target that each kind reads, with their numbers."""
        super().__init__(rows)
        self._layers, self._dtype = layers, dtype
        self.fill(0)

    def prepare(self, target: KVCache | None, last: int) -> None:
        super().prepare(target, last)
        if isinstance(target, HostCache):
            self.skip(last)  # earlier rows are nothing that later ones read
            pairs = {kind: self._read(target, *each, max(1, last)) for kind, each in self._layers.items()}
            self.attention = SharedAttention(pairs, last)
        else:
            self.fill(last)

    def fill(self, length: int, noise: Any = None) -> None:
        """Has zeros for the target's keys and values: a text for measurements."""
        self.skip(length)
        pairs = {}
        for kind, (_, layer) in self._layers.items():
            sizes = ((layer.heads, length + 1, width) for width in (layer.key_dim, layer.value_dim))
            keys, values = (torch.full(size, 0.0, dtype=self._dtype) for size in sizes)
            pairs[kind] = keys, values
        self.attention = SharedAttention(pairs, length)

    def _read(self, target: HostCache, number: int, layer: LayerShape, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's first `length` keys and values: views, unless they are stored in 8 bits."""
        stored = getattr(torch, str(target.stored_dtype).removeprefix("torch."))
        keys, values = (tensor_of(each, stored)[:, :length] for each in target.layers[number])
        if stored.itemsize > 1:
            return keys, values
        return decode(keys, layer.key_dim, self._dtype), decode(values, layer.value_dim, self._dtype)


class AssistantModel(HeadModel):
    """An assistant beside a target on a CPU."""

    def __init__(self, head: AssistantHead, target: Target, pack: bool = True) -> None:
        self._layers = layers_read(target)
        super().__init__(head, target, pack)

    def new_cache(self) -> AssistantCache:
        return AssistantCache(self._new_rows(), self._layers, self._dtype)

    def _probe(self) -> ShapeProbe:
        return ShapeProbe()  # it has no keys of its own

    def _attention(self, cache: HeadCache, batch: ForwardBatch) -> Attention:
        return cast(AssistantCache, cache).attention

    def _advance(self, tokens: torch.Tensor, positions: torch.Tensor, states: torch.Tensor, attention: Any) -> torch.Tensor:
        return super()._advance(tokens, torch.full_like(positions, attention.position), states, attention)


def layers_read(target: Target) -> dict[str, tuple[int, LayerShape]]:
    """The target's last layer of each kind, with its number."""
    layers = enumerate(target.cache_shape.layers)
    return {FULL if layer.window is None else SLIDING: (number, layer) for number, layer in layers}


def new_assistant(config: Mapping[str, Any], scale: float) -> AssistantHead:
    """The network that a config.json describes. `scale` as in AssistantHead."""
    whole: Any = AutoConfig.for_model(**config)
    text, kind = whole.text_config, type(whole.text_config)
    # transformers 5.23 refuses what an assistant is: all layers read the keys of others.
    text.__class__ = type(kind.__name__, (kind,), {"kv_sharing_modes": ["reuse"] * text.num_hidden_layers})
    text._attn_implementation = NAME
    clusters = (int(whole.num_centroids), int(whole.centroid_intermediate_top_k)) if whole.use_ordered_embeddings else None
    return AssistantHead(text, int(whole.backbone_hidden_size), scale, clusters)
