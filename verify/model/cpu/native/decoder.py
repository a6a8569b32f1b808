"""Packs a decoder's weights for the library, and describes it to the library."""

import ctypes
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from outrider.verify.model.architecture.description import Architecture, Layer, Mixture
from outrider.verify.model.architecture.families import BY_FILE
from outrider.verify.model.architecture.rotary import frequencies
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.packed_file import PackedFile
from outrider.verify.model.cpu.native.packing import Packer, Precision, Size, order
from outrider.verify.model.cpu.native.parts import NAMES, ROUTER, fits, pack_latent, pack_mixture, pack_recurrence
from outrider.verify.model.cpu.native.weights import Weights, table_of
from outrider.verify.model.tensors import Tensors

# Sizes are multiples of this (vector.h).
SUMMED = 16
# The largest width of a layer's embeddings (forward_embeddings.h).
MOST_EMBEDDING = 1024
# The most residuals (altup.h).
MOST_RESIDUALS = 8
# The most inputs before a row that its convolution reads (recurrence.h).
MOST_WINDOW = 15
TABLE, HEAD, NORM = "token_embd", "output", "output_norm"
LFM2_NORM = "token_embd_norm"  # NORM of its family
FUSED_ATTENTION, GATE, UP, DOWN = "attn_qkv", "ffn_gate", "ffn_up", "ffn_down"
# Names of a layer's tensors in files, by the library's names.
SINKS = "attn_sinks.weight"
SHARED = {"gate": "ffn_gate_shexp", "up": "ffn_up_shexp", "down": "ffn_down_shexp"}
LINEARS = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "output": "attn_output", "gate": GATE, "up": UP, "down": DOWN}
NORMS = {
    "attention_norm": "attn_norm",
    "attention_post_norm": "post_attention_norm",
    "feed_forward_norm": "ffn_norm",
    "feed_forward_post_norm": "post_ffw_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "embedding_post_norm": "post_norm",
}
# Embeddings of tokens for each layer, what a layer computes of them, and what it multiplies the residual by.
LAYER_TABLE, LAYER_PROJECTION, LAYER_NORM = "per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"
EMBEDDING_GATE, EMBEDDING_OUTPUT, LAYER_SCALE = "inp_gate", "proj", "layer_output_scale"
# Of several residuals, and of what augments the first one.
EXPAND, MERGE, UPDATE_NORM, UPDATE_ROUTER = "altup_proj", "altup_unembd_proj", "altup_router_norm", "altup_router"
UPDATES = {
    "router": UPDATE_ROUTER,
    "predict": "altup_predict_coef",
    "correct": "altup_correct_coef",
    "scale": "altup_correct_scale",
}
AUGMENT_DOWN, AUGMENT_UP, AUGMENT_NORM = "laurel_l", "laurel_r", "laurel_post_norm"
OF_HEADS = ("query_norm", "key_norm")  # of each, or of all together


def supports(architecture: Architecture) -> bool:
    """Whether the library computes a decoder of these sizes."""
    attending = [each for each in architecture.layers if each.heads]
    widths = all(each.head_dim % SUMMED == 0 and (each.latent is None or fits(each.latent)) for each in attending)
    states = [each.recurrence for each in architecture.layers if each.recurrence is not None]
    sizes = all(each.key_dim % SUMMED == each.value_dim % SUMMED == 0 < each.window <= MOST_WINDOW for each in states)
    kinds = {(each.kind, each.window, each.heads, each.key_dim, each.value_dim, each.decay_dim) for each in states}
    embeddings = architecture.embedding_width % SUMMED == 0 and architecture.embedding_width <= MOST_EMBEDDING
    residuals = architecture.residuals <= MOST_RESIDUALS
    return architecture.hidden % SUMMED == 0 and residuals and embeddings and widths and sizes and len(kinds) <= 1


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


def pack(
    architecture: Architecture, tensors: Tensors, engine: Engine, precision: Precision, file: PackedFile | None = None
) -> Decoder | None:
    """The decoder; None if there are weights that it would not use. Requires `supports`. Raises ModelError."""
    packing = Packing(architecture, tensors, engine, precision, file or PackedFile())
    return packing.decoder() if packing.uses_all() else None


class Packing(Packer):
    def uses_all(self) -> bool:
        """Whether every tensor is one that is packed: others would make the model another one."""
        known = {TABLE, HEAD, NORM, LFM2_NORM, "rope_freqs", "rope_factors_long", "rope_factors_short"}
        known |= {LAYER_TABLE, LAYER_PROJECTION, LAYER_NORM}
        known |= {f"{name}.{number}" for name in (EXPAND, MERGE) for number in range(self.architecture.residuals - 1)}
        parts = [*LINEARS.values(), *NORMS.values(), *SHARED.values(), FUSED_ATTENTION, SINKS.rpartition(".")[0]]
        parts += [*NAMES, EMBEDDING_GATE, EMBEDDING_OUTPUT, LAYER_SCALE]
        parts += [*UPDATES.values(), UPDATE_NORM, AUGMENT_DOWN, AUGMENT_UP, AUGMENT_NORM]
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
        self.check(TABLE, stored, (known.vocabulary, known.hidden))
        table = Weights.stored(self.engine, stored, self.precision.rest, self.file)
        tied = f"{HEAD}.weight" not in self.tensors
        head, kind = table, self.precision.head
        if kind is not None or not tied:
            source = stored if tied else self.tensors[f"{HEAD}.weight"]
            head = Weights.stored(self.engine, source, kind or self.precision.rest, self.file)
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
            head=structures.Linear(head.matrix, self.vector(f"{HEAD}.bias", head.outputs)),
            norm=self.norm(NORM if self.has(NORM) else LFM2_NORM, known.hidden),
        )
        if known.embedding_width:
            description.embeddings = self._embeddings(known.embedding_width)
        if known.residuals:
            description.residuals = known.residuals
            description.expand, description.merge = self._between_residuals(EXPAND), self._between_residuals(MERGE)
        return Decoder(known, description, layers, table, head, self.size, [self.kept, table, head])

    def _embeddings(self, width: int) -> structures.LayerEmbeddings:
        """The embeddings for each layer. The table is large, and stays where it is."""
        hidden, total = self.architecture.hidden, width * len(self.architecture.layers)
        stored = self.tensors[f"{LAYER_TABLE}.weight"]
        self.check(LAYER_TABLE, stored, (stored.shape[0], total))
        table, kept = table_of(stored, width)
        self.kept.append(kept)
        norm = self.plain_norm(self.floats(f"{LAYER_NORM}.weight", width))
        return structures.LayerEmbeddings(table, self.linear(LAYER_PROJECTION, (total, hidden)), norm)

    def _between_residuals(self, name: str) -> Any:
        """The layers that compute the other residuals of the first one, or what is averaged of them."""
        hidden, count = self.architecture.hidden, self.architecture.residuals - 1
        found = (structures.Linear * count)(*(self.linear(f"{name}.{number}", (hidden, hidden)) for number in range(count)))
        self.kept.append(found)
        return ctypes.cast(found, ctypes.POINTER(structures.Linear))

    def _updates(self, place: str) -> dict[str, Any]:
        """How a layer changes several residuals, and augments the first one."""
        hidden, count = self.architecture.hidden, self.architecture.residuals
        sizes = {"router": count * hidden, "predict": count**3, "correct": count**2, "scale": hidden}
        vectors = {name: self.keep(self.floats(f"{place}{UPDATES[name]}.weight", size)) for name, size in sizes.items()}
        norm = self.plain_norm(self.floats(f"{place}{UPDATE_NORM}.weight", hidden) / np.float32(hidden))
        updates = structures.Updates(norm, **vectors)
        self.kept.append(updates)
        few = self.tensors[f"{place}{AUGMENT_DOWN}.weight"].shape[0]
        return {
            "updates": ctypes.pointer(updates),
            "augment_down": self.linear(place + AUGMENT_DOWN, (few, hidden)),
            "augment_up": self.linear(place + AUGMENT_UP, (hidden, few)),
            "augment_post_norm": self.norm(place + AUGMENT_NORM, hidden),
        }

    def _layer(self, number: int) -> structures.Layer:
        known, place = self.architecture, f"blk.{number}."
        layer = known.layers[number]
        attention = self._attention if layer.latent is None else partial(pack_latent, self)
        parts: dict[str, Any] = dict(attention(place, layer)) if layer.heads else {}
        if layer.recurrence is not None:
            parts["recurrence"] = ctypes.pointer(pack_recurrence(self, place, number, layer.recurrence))
        if not layer.feeds:
            pass
        elif self.architecture.mixture is not None and self.has(place + ROUTER):
            parts |= self._mixture(number, self.architecture.mixture)
        else:
            parts |= self._feed_forward(place)
        sizes = {
            name: (heads * layer.head_dim, layer.head_dim)
            for name, heads in zip(OF_HEADS, (layer.heads, layer.kv_heads), strict=True)
        }
        norms = {name: self.norm(place + stored, *sizes.get(name, (known.hidden,))) for name, stored in NORMS.items()}
        if layer.norms_values:
            norms["value_norm"] = self.plain_norm(np.ones(layer.head_dim, np.float32))
        if known.residuals:
            parts |= self._updates(place)
        if known.embedding_width:
            shape = (known.embedding_width, known.hidden)
            parts["embedding_gate"] = self.linear(place + EMBEDDING_GATE, shape)
            parts["embedding_output"] = self.linear(place + EMBEDDING_OUTPUT, shape[::-1])
        if not layer.heads and layer.recurrence is None:
            norms |= {"feed_forward_norm": norms["attention_norm"]}  # files name the only one so
        if not known.norms_after_attention or (known.name == "olmo2" and layer.recurrence is not None):
            norms |= {"attention_post_norm": structures.Norm(), "feed_forward_norm": norms["attention_post_norm"]}
        if known.is_parallel and not norms["feed_forward_norm"].kind:
            norms["feed_forward_norm"] = norms["attention_norm"]
        return structures.Layer(
            **norms | parts,
            sinks=self.vector(place + SINKS, layer.heads),
            heads=layer.heads,
            kv_heads=layer.kv_heads,
            head_dim=layer.head_dim,
            value_dim=layer.head_dim if layer.latent is None else layer.latent.rank,
            cached=sum(each.is_cached for each in known.layers[: number if layer.source is None else layer.source]),
            window=layer.window or 0,
            rotary=-1 if layer.rotary is None else layer.rotary,
            rotated=0 if layer.latent is None else layer.latent.rank,
            activation=known.activation.value,
            parallel=known.is_parallel,
            scaling=layer.scaling,
            cap=layer.cap or 0.0,
            alpha=known.clamp[0],
            limit=known.clamp[1],
            deviations=layer.deviations,
            scale=float(self.floats(f"{place}{LAYER_SCALE}.weight", 1)[0]) if self.has(place + LAYER_SCALE) else 1.0,
        )

    def _attention(self, place: str, layer: Layer) -> dict[str, structures.Linear]:
        query, key = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim
        hidden, width = self.architecture.hidden, layer.head_dim
        if layer.is_gated:  # a head's query, then its gate
            pairs = np.arange(2 * query).reshape(layer.heads, 2, width)
            rest = {name: self.linear(place + LINEARS[name], (key, hidden)) for name in ("key", "value")}
            both = {name: pairs[:, part].reshape(-1) for part, name in enumerate(("query", "query_gate"))}
            found = {name: self.linear(place + LINEARS["query"], (query, hidden), rows) for name, rows in both.items()}
            return found | rest | {"output": self.linear(place + LINEARS["output"], (hidden, query))}
        starts = {"query": (0, query), "key": (query, query + key), "value": (query + key, query + 2 * key)}
        fused = self.has(place + FUSED_ATTENTION)
        found = {}
        for name, (start, end) in starts.items():
            if name != "query" and layer.source is not None:
                continue
            if name == "value" and layer.norms_values and not fused and not self.has(place + LINEARS[name]):
                continue  # keys are values, too
            source = place + (FUSED_ATTENTION if fused else LINEARS[name])
            rows = np.arange(start if fused else 0, end if fused else end - start)
            turned = None if name == "value" else order(self.architecture, layer, name, self.architecture.has_pairs)
            taken = rows if fused or self.architecture.has_pairs else None
            taken = rows[turned] if turned is not None else taken
            found[name] = self.linear(source, (end - start, hidden), taken, self.multiplier(name))
        return found | {"output": self.linear(place + LINEARS["output"], (hidden, query), None, self.multiplier("output"))}

    def _feed_forward(self, place: str) -> dict[str, structures.Linear]:
        hidden = self.architecture.hidden
        if self.has(place + SHARED["down"]):  # Granite's, of a model without experts
            return self._shared(place)
        inner = self.tensors[f"{place}{DOWN}.weight"].shape[1]
        found = {"down": self.linear(place + DOWN, (hidden, inner), None, self.multiplier("down"))}
        if self.has(place + GATE):
            linears = {name: (LINEARS[name], self.multiplier(name)) for name in ("gate", "up")}
            return found | {name: self.linear(place + of, (inner, hidden), None, by) for name, (of, by) in linears.items()}
        if self.tensors[f"{place}{UP}.weight"].shape[0] == inner:
            return found | {"up": self.linear(place + UP, (inner, hidden))}
        halves = {"gate": slice(0, inner), "up": slice(inner, 2 * inner)}  # fused
        return found | {name: self.linear(place + UP, (inner, hidden), rows) for name, rows in halves.items()}

    def _mixture(self, number: int, known: Mixture) -> dict[str, Any]:
        place = f"blk.{number}."
        found: dict[str, Any] = {"mixture": ctypes.pointer(pack_mixture(self, number, known))}
        return found | (self._feed_forward(place) if self.has(place + SHARED["down"]) or self.has(place + DOWN) else {})

    def _shared(self, place: str) -> dict[str, structures.Linear]:
        hidden, inner = self.architecture.hidden, self.tensors[f"{place}{SHARED['down']}.weight"].shape[1]
        shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        has_gate = self.has(place + SHARED["gate"])
        names = {name: shape for name, shape in shapes.items() if has_gate or name != "gate"}
        return {name: self.linear(place + SHARED[name], shape) for name, shape in names.items()}


def ordered(architecture: Architecture, layer: int, name: str, rows: Any) -> Any:
    """Brings an adapter's rows of a projection into the order that is packed: adapters have that of checkpoints."""
    has_pairs = name in ("query", "key") and BY_FILE[architecture.name].pairs_in_checkpoints
    turned = order(architecture, architecture.layers[layer], name, has_pairs)
    return rows if turned is None else rows[turned]
