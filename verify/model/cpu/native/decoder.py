"""Packs a decoder's weights for the library, and describes it to the library."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.model.architecture.description import Architecture, Layer, Mixture
from outrider.verify.model.architecture.families import BY_FILE
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.weights import Kind, Weights
from outrider.verify.model.experts import expert_name
from outrider.verify.model.stored import Stored
from outrider.verify.model.tensors import Tensors

# Sizes are multiples of this (vector.h).
SUMMED = 16
# The largest width of a head (attention.h).
MOST_WIDTH = 256
# The largest number of query heads for one key head.
MOST_GROUPS = 64
TABLE, HEAD, NORM = "token_embd", "output", "output_norm"
FUSED_ATTENTION, GATE, UP, DOWN = "attn_qkv", "ffn_gate", "ffn_up", "ffn_down"
# Names of a layer's tensors in files, by the library's names.
ROUTER, ROUTER_BIAS, SHARED_GATE, SINKS = "ffn_gate_inp", "exp_probs_b.bias", "ffn_gate_inp_shexp", "attn_sinks.weight"
SHARED = {"gate": "ffn_gate_shexp", "up": "ffn_up_shexp", "down": "ffn_down_shexp"}
LINEARS = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output", "gate": GATE, "up": UP, "down": DOWN}
NORMS = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
}


def supports(architecture: Architecture) -> bool:
    """Whether the library computes a decoder of these sizes."""
    widths = all(each.head_dim % SUMMED == 0 and each.head_dim <= MOST_WIDTH for each in architecture.layers)
    groups = all(each.heads // each.kv_heads <= MOST_GROUPS for each in architecture.layers)
    return architecture.hidden % SUMMED == 0 and widths and groups


@dataclass(frozen=True)
class Precision:
    """To what a checkpoint's weights are rounded; None = as they are, in the form that the library has for them."""

    layers: Kind | None = None
    head: Kind | None = None
    rest: Kind | None = None  # the embedding table, and layers that `layers` does not fit


@dataclass
class Size:
    """Bytes and number of the weights that a step reads."""

    nbytes: int = 0
    weights: int = 0

    def add(self, weights: Weights) -> None:
        self.nbytes += weights.nbytes
        self.weights += weights.outputs * weights.inputs


@dataclass(eq=False)
class Decoder:
    """A packed model: the library's description, and what it refers to."""

    architecture: Architecture
    description: structures.Model
    layers: ctypes.Array[structures.Layer]
    table: Weights
    head: Weights
    size: Size
    kept: list[object] = field(repr=False)

    def fit(self, context_tokens: int) -> None:
        """Chooses the rotary tables for texts of this length."""
        tables = []
        for each in self.architecture.rotaries:
            found, scaling = frequencies(each, context_tokens)
            self.kept.append(found)
            temperature = each.scaling.get("llama_4_scaling_beta", 0.0)
            span = each.scaling.get("original_max_position_embeddings", 1)
            tables.append(structures.Rotary(found.ctypes.data, each.size, scaling, temperature, span))
        array = (structures.Rotary * max(1, len(tables)))(*tables)
        self.kept.append(array)
        self.description.rotaries = len(tables)
        self.description.rotary = ctypes.cast(array, ctypes.POINTER(structures.Rotary))

    def shape_of(self, layer: int, name: str) -> tuple[int, int]:
        """The outputs and inputs of a projection of a layer."""
        matrix = getattr(self.layers[layer], name).matrix
        return matrix.outputs, matrix.inputs


def pack(architecture: Architecture, tensors: Tensors, engine: Engine, precision: Precision) -> Decoder | None:
    """The decoder; None if there are weights that it would not use. Requires `supports`. Raises ModelError."""
    packing = Packing(architecture, tensors, engine, precision)
    return packing.decoder() if packing.uses_all() else None


class Packing:
    """Packs one model."""

    def __init__(self, architecture: Architecture, tensors: Tensors, engine: Engine, precision: Precision) -> None:
        self.architecture, self.tensors, self.engine, self.precision = architecture, tensors, engine, precision
        self.size, self.kept = Size(), list[object]()

    def uses_all(self) -> bool:
        """Whether every tensor is one that is packed: others would make the model another one."""
        known = {TABLE, HEAD, NORM, "rope_freqs", "rope_factors_long", "rope_factors_short"}
        parts = [*LINEARS.values(), *NORMS.values(), *SHARED.values(), FUSED_ATTENTION, ROUTER, SHARED_GATE]
        parts += [name.rpartition(".")[0] for name in (ROUTER_BIAS, SINKS)]
        mixture, layers = self.architecture.mixture, range(len(self.architecture.layers))
        for expert in range(mixture.experts if mixture else 0):
            parts += [f"ffn_{part}_exps.{expert}" for part in ("gate", "up", "down")]
        known |= {f"blk.{layer}.{part}" for layer in layers for part in parts}
        further = tuple(f"blk.{layer}." for layer in range(len(layers), len(layers) + 8))  # that predict several tokens
        return all(name.rpartition(".")[0] in known or name.startswith(further) for name in self.tensors)

    def decoder(self) -> Decoder:
        """Packs all weights. Raises ModelError."""
        known = self.architecture
        stored = self.tensors[f"{TABLE}.weight"]
        if stored.shape != (known.vocabulary, known.hidden):
            found, expected = (" x ".join(map(str, each)) for each in (stored.shape, (known.vocabulary, known.hidden)))
            raise ModelError(
                f"The embedding table of {self.tensors.path!r} is {found}, and its configuration says {expected}; download it"
                " again, or name another one."
            )
        table = Weights.stored(self.engine, stored, self.precision.rest)
        tied = f"{HEAD}.weight" not in self.tensors
        head = table if tied and self.precision.head is None else self._head(TABLE if tied else HEAD)
        self.size.add(head)
        layers = (structures.Layer * len(known.layers))(*map(self._layer, range(len(known.layers))))
        description = structures.Model(
            layers=len(known.layers),
            hidden=known.hidden,
            epsilon=known.epsilon,
            embedding_scale=known.embedding_scale,
            residual_scale=known.residual_scale,
            logit_scale=known.logit_scale,
            logit_cap=known.logit_cap or 0.0,
            layer=ctypes.cast(layers, ctypes.POINTER(structures.Layer)),
            embedding=table.matrix,
            head=structures.Linear(head.matrix, self._vector(f"{HEAD}.bias")),
            norm=self._norm(NORM),
        )
        return Decoder(known, description, layers, table, head, self.size, [self.kept, table, head])

    def _head(self, name: str) -> Weights:
        return Weights.stored(self.engine, self.tensors[f"{name}.weight"], self.precision.head or self.precision.rest)

    def _layer(self, number: int) -> structures.Layer:
        known, place = self.architecture, f"blk.{number}."
        layer = known.layers[number]
        parts: dict[str, Any] = dict(self._attention(place, layer))
        if self.architecture.mixture is not None and f"{place}{ROUTER}.weight" in self.tensors:
            parts |= self._mixture(number, self.architecture.mixture)
        else:
            parts |= self._feed_forward(place)
        norms = {name: self._norm(place + stored) for name, stored in NORMS.items()}
        for name, heads in (("query_norm", layer.heads), ("key_norm", layer.kv_heads)):
            norms[name].size = min(norms[name].size, heads * layer.head_dim)
        if not known.norms_after_attention:
            norms |= {"attention_post_norm": structures.Norm(), "feed_forward_norm": norms["attention_post_norm"]}
        if known.is_parallel and not norms["feed_forward_norm"].kind:
            norms["feed_forward_norm"] = norms["attention_norm"]
        return structures.Layer(
            **norms,
            **parts,
            sinks=self._vector(place + SINKS),
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            cached=number,
            window=layer.window or 0,
            rotary=-1 if layer.rotary is None else layer.rotary,
            activation=known.activation.value,
            parallel=known.is_parallel,
            scaling=layer.scaling,
            cap=layer.cap or 0.0,
            alpha=known.clamp[0],
            limit=known.clamp[1],
        )

    def _attention(self, place: str, layer: Layer) -> dict[str, structures.Linear]:
        query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        hidden = self.architecture.hidden
        starts = {"query": (0, query), "key": (query, query + key), "value": (query + key, query + 2 * key)}
        fused = f"{place}{FUSED_ATTENTION}.weight" in self.tensors
        found = {}
        for name, (start, end) in starts.items():
            source = place + (FUSED_ATTENTION if fused else LINEARS[name])
            rows = np.arange(start if fused else 0, end if fused else end - start)
            if name != "value" and self.architecture.has_pairs and layer.rotary is not None:
                size = self.architecture.rotaries[layer.rotary].size
                rows = rows[halves(len(rows) // layer.head_dim, layer.head_dim, size)]
            found[name] = self._linear(source, (end - start, hidden), rows if fused or self.architecture.has_pairs else None)
        return found | {"output": self._linear(place + LINEARS["output"], (hidden, query))}

    def _feed_forward(self, place: str) -> dict[str, structures.Linear]:
        hidden = self.architecture.hidden
        inner = self.tensors[f"{place}{DOWN}.weight"].shape[1]
        found = {"down": self._linear(place + DOWN, (hidden, inner))}
        if f"{place}{GATE}.weight" in self.tensors:
            return found | {name: self._linear(place + LINEARS[name], (inner, hidden)) for name in ("gate", "up")}
        if self.tensors[f"{place}{UP}.weight"].shape[0] == inner:
            return found | {"up": self._linear(place + UP, (inner, hidden))}
        halves = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}  # fused
        return found | {name: self._linear(place + UP, (inner, hidden), rows) for name, rows in halves.items()}

    def _mixture(self, number: int, known: Mixture) -> dict[str, Any]:
        """The experts of a layer, and the shared one."""
        hidden, place = self.architecture.hidden, f"blk.{number}."
        counted, self.size = self.size, Size()  # a step reads those that it uses
        experts = [each for expert in range(known.experts) for each in self._expert(number, expert)]
        counted.nbytes += self.size.nbytes * known.used // known.experts
        counted.weights += self.size.weights * known.used // known.experts
        self.size = counted
        array = (structures.Linear * len(experts))(*experts)
        has_gate = f"{place}{SHARED_GATE}.weight" in self.tensors
        mixture = structures.Mixture(
            router=self._router(place + ROUTER, known.experts),
            bias=self._vector(place + ROUTER_BIAS),
            experts=ctypes.cast(array, ctypes.POINTER(structures.Linear)),
            shared_gate=self._router(place + SHARED_GATE, 1) if has_gate else structures.Linear(),
            count=known.experts,
            used=known.used,
            scores=known.scores.value,
            normalized=known.normalizes,
            groups=known.groups,
            used_groups=known.used_groups,
            scale=known.scale,
        )
        self.kept += [array, mixture]
        found: dict[str, Any] = {"mixture": ctypes.pointer(mixture)}
        if f"{place}{SHARED['down']}.weight" in self.tensors:
            inner = self.tensors[f"{place}{SHARED['down']}.weight"].shape[1]
            shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
            found |= {name: self._linear(place + SHARED[name], shape) for name, shape in shapes.items()}
        return found

    def _expert(self, layer: int, number: int) -> list[structures.Linear]:
        """Gate, up and down."""
        hidden = self.architecture.hidden
        gate, up, down = (expert_name(layer, part, number).removesuffix(".weight") for part in ("gate", "up", "down"))
        inner = self.tensors[f"{down}.weight"].shape[1]
        return [*(self._linear(name, (inner, hidden)) for name in (gate, up)), self._linear(down, (hidden, inner))]

    def _router(self, name: str, outputs: int) -> structures.Linear:
        """A small layer, whose products decide: in float32, whatever the others are rounded to."""
        weights = Weights.of(self.engine, Kind.FLOAT32, self.tensors[f"{name}.weight"].floats().reshape(outputs, -1))
        self.kept.append(weights)
        return structures.Linear(weights.matrix, self._vector(f"{name}.bias"))

    def _linear(self, name: str, shape: tuple[int, int], rows: NDArray[np.int64] | slice | None = None) -> structures.Linear:
        """A linear layer, of these rows. Raises ModelError unless its shape is [outputs, inputs]."""
        stored = self.tensors[f"{name}.weight"]
        if rows is not None:
            stored = self._taken(stored, rows, name)
        if stored.shape != shape:
            found, expected = (" x ".join(map(str, each)) for each in (stored.shape, shape))
            raise ModelError(
                f"The tensor {name} of {self.tensors.path!r} is {found}, and its configuration says {expected}; download it"
                " again, or name another one."
            )
        fits = self.precision.layers is not None and self.precision.layers.fits(shape[1])
        weights = Weights.stored(self.engine, stored, self.precision.layers if fits else self.precision.rest)
        self.kept.append(weights)
        self.size.add(weights)
        return structures.Linear(weights.matrix, self._vector(f"{name}.bias", rows))

    def _taken(self, stored: Stored, rows: NDArray[np.int64] | slice, name: str) -> Stored:
        try:
            return stored.take(rows)
        except IndexError:
            raise ModelError(
                f"The tensor {name} of {self.tensors.path!r} is smaller than its configuration says; download it again, or name"
                " another one."
            ) from None

    def _norm(self, name: str) -> structures.Norm:
        """A norm; of kind 0 if the model has none there."""
        if f"{name}.weight" not in self.tensors:
            return structures.Norm()
        add = 1.0 if self.architecture.norms_less_one else 0.0
        weight = self._vector(f"{name}.weight", add=add)
        size = self.tensors[f"{name}.weight"].shape[-1]
        return structures.Norm(weight, self._vector(f"{name}.bias"), self.architecture.norm.value, size)

    def _vector(self, name: str, rows: NDArray[np.int64] | slice | None = None, add: float = 0.0) -> int | None:
        """The address of a vector as float32; None if the model has none."""
        if name not in self.tensors:
            return None
        stored = self.tensors[name]
        values = np.array((stored if rows is None else self._taken(stored, rows, name)).floats(), np.float32) + np.float32(add)
        self.kept.append(values)
        return int(values.ctypes.data)


def halves(heads: int, width: int, rotary: int) -> NDArray[np.int64]:
    """The rows of heads whose first `rotary` values are pairs side by side, so that they are half of `rotary` apart."""
    head = np.r_[0:rotary:2, 1:rotary:2, rotary:width]
    found: NDArray[np.int64] = (np.arange(heads)[:, None] * width + head).reshape(-1)
    return found


def ordered(architecture: Architecture, layer: int, name: str, rows: Any) -> Any:
    """Brings an adapter's rows of a projection into the order that is packed: adapters have that of checkpoints."""
    known = architecture.layers[layer]
    if name not in ("query", "key") or known.rotary is None or not BY_FILE[architecture.name].pairs_in_checkpoints:
        return rows
    heads = known.heads if name == "query" else known.kv_heads
    return rows[halves(heads, known.head_dim, architecture.rotaries[known.rotary].size)]
