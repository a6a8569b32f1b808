"""The networks of block heads, DFlash (arXiv 2602.06036), DFlash 2 and DSpark, and what their config.json says of them.

A block head drafts a block of tokens in one forward. Its rows are the last token (the anchor) and mask tokens; they attend to
each other and to the context, whose keys and values come from the target's hidden states. Then DSpark corrects a position's
logits by the token before it, and DFlash 2 ranks the likeliest tokens again. Knows nothing about caches or checkpoints.
Parameters have the names of the published checkpoints. Configurations are those of speculators 0.9 and dflash 0.1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.nn.functional import pad
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from outrider.drafters.interface import MAX_NODES
from outrider.verify.errors import ModelError
from outrider.verify.heads.networks import Head
from outrider.verify.model.attention.interface import NAME

# The window of layers that name none, in which a causal mask remains.
NO_WINDOW = 1 << 30


@dataclass(frozen=True)
class BlockShape:
    """What a block head is beside its layers."""

    layers_read: tuple[int, ...]  # the target's layers whose inputs are the context
    rows: int  # of a block, the anchor included
    mask_token: int
    from_anchor: bool = False  # whether the anchor's row drafts the first token; otherwise the row after it does
    full_both_ways: bool = True  # whether rows also attend to later ones, in layers without a window
    windows_both_ways: bool = False  # the same in layers with a window
    anchored_windows: bool = False  # whether windows are counted from the anchor, not from each row
    draft_vocabulary: int | None = None  # of the head's own logits; None = the target computes them
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0  # bound of the logits; 0 = none
    convolution: tuple[int, int] | None = None  # DFlash 2: taps, and channels that share a kernel
    selector: tuple[int, int] | None = None  # DFlash 2: rank, and candidates
    markov: tuple[int, str] | None = None  # DSpark: rank, and kind ("vanilla", "gated" or "rnn")
    confidence: str = ""  # DSpark: what predicts acceptance, "states" or "both" (with the token before); "" = nothing

    @property
    def drafted(self) -> int:
        return self.rows - (not self.from_anchor)


class Convolution(torch.nn.Module):
    """DFlash 2: causal convolutions over a block before and after a part of a layer, by kernels that depend on the row."""

    def __init__(self, size: int, taps: int, shared: int) -> None:
        super().__init__()
        self._shape = (2, taps, size // shared, 1)
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = torch.nn.Linear(size, 2 * taps * size // shared, bias=False)

    def around(self, rows: torch.Tensor, part: Any) -> torch.Tensor:
        """`part`, between the convolutions of rows [1, N, size]."""
        kernels = self.kernel_projection(rows).unflatten(-1, self._shape)  # [1, N, 2, taps, groups, 1]
        return self._convolved(part(self._convolved(rows, kernels, 0)), kernels, 1)

    def _convolved(self, rows: torch.Tensor, kernels: torch.Tensor, side: int) -> torch.Tensor:
        base = self.base_kernel[side].unflatten(-1, (kernels.shape[-2], -1)).to(rows.dtype)
        grouped, found = rows.unflatten(-1, base.shape[1:]), torch.zeros((), dtype=rows.dtype, device=rows.device)
        for tap in range(len(base)):
            earlier = pad(grouped, (0, 0, 0, 0, tap, 0))[:, : rows.shape[1]]
            found = found + earlier * (base[tap] + kernels[:, :, side, tap])
        return found.flatten(-2)


class BlockLayer(Qwen3DecoderLayer):  # type: ignore[misc]  # transformers carries no types
    """A Qwen3 layer, which DFlash 2 surrounds with convolutions."""

    def __init__(self, config: PreTrainedConfig, index: int, convolution: tuple[int, int] | None) -> None:
        super().__init__(config, index)
        if convolution is not None:
            self.attention_conv = Convolution(config.hidden_size, *convolution)
            self.mlp_conv = Convolution(config.hidden_size, *convolution)

    def forward(self, rows: torch.Tensor, **others: Any) -> torch.Tensor:
        if not hasattr(self, "attention_conv"):
            return cast(torch.Tensor, super().forward(rows, **others))
        attended = self.attention_conv.around(self.input_layernorm(rows), lambda part: self.self_attn(part, **others)[0])
        rows = rows + attended
        return rows + self.mlp_conv.around(self.post_attention_layernorm(rows), self.mlp)

    def context(self, states: torch.Tensor, rotation: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, kv_heads, N, head_dim] of the context's states [1, N, size]."""
        attention = self.self_attn
        shape = (*states.shape[:2], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(states).view(shape)).transpose(1, 2)
        keys, _ = apply_rotary_pos_emb(keys, keys, *rotation)
        return keys, attention.v_proj(states).view(shape).transpose(1, 2)


class Markov(torch.nn.Module):
    """DSpark: what the token before a position adds to its logits."""

    def __init__(self, vocabulary: int, outputs: int, size: int, rank: int, kind: str) -> None:
        super().__init__()
        self._kind = kind
        self.markov_w1 = torch.nn.Embedding(vocabulary, rank)
        self.markov_w2 = torch.nn.Linear(rank, outputs, bias=False)
        if kind == "gated":
            self.gate_proj = torch.nn.Linear(size + rank, rank)
        if kind == "rnn":
            self.joint_proj = torch.nn.Linear(2 * rank + size, 3 * rank)

    def step(self, tokens: torch.Tensor, states: torch.Tensor, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is added to the logits of R rows [R, outputs], and their memory [R, rank].

        They have the states [R, size], and follow tokens [R] and rows with `memory`.
        """
        before = self.markov_w1(tokens)
        if self._kind == "vanilla":
            return self.markov_w2(before), memory
        if self._kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([states, before], -1)))
            return self.markov_w2(gate * before), memory
        gate, new, out = self.joint_proj(torch.cat([memory, before, states], -1)).chunk(3, -1)
        gate = torch.sigmoid(gate)
        return self.markov_w2(torch.tanh(out)), gate * memory + (1 - gate) * torch.tanh(new)


class Selector(torch.nn.Module):
    """DFlash 2: ranks a position's likeliest tokens again, by the token before it."""

    def __init__(self, vocabulary: int, size: int, rank: int, candidates: int) -> None:
        super().__init__()
        self._candidates = candidates
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(vocabulary, rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(vocabulary, rank))
        self.hidden_projection = torch.nn.Linear(size, rank, bias=False)

    def forward(self, logits: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [R, V] of rows with the states [R, size] that follow tokens [R]; -inf for other tokens."""
        best, ids = logits.topk(self._candidates, -1)
        context = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        scores = best + (context[:, None] * self.successor_codebook[ids]).sum(-1)
        return torch.full_like(logits, -torch.inf).scatter(-1, ids, scores.to(logits.dtype))


class Confidence(torch.nn.Module):
    """DSpark: predicts the probability that a position's token is accepted."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(inputs, 1)


class BlockHead(Head):
    """A block head on its target's device."""

    def __init__(self, config: PreTrainedConfig, shape: BlockShape, vocabulary: int) -> None:
        """`vocabulary` is the number of the target's logits."""
        super().__init__()
        self.shape, self.layers_read, self.size, self._vocabulary = shape, shape.layers_read, config.hidden_size, vocabulary
        self.fc = torch.nn.Linear(len(self.layers_read) * self.size, self.size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(self.size, eps=config.rms_norm_eps)
        self.layers = torch.nn.ModuleList(
            [BlockLayer(config, index, shape.convolution) for index in range(config.num_hidden_layers)]
        )
        self.norm = Qwen3RMSNorm(self.size, eps=config.rms_norm_eps)
        self.rotary = Qwen3RotaryEmbedding(config)
        own = shape.draft_vocabulary
        if own is not None:
            self.lm_head = torch.nn.Linear(self.size, own, bias=False)
            self.register_buffer("d2t", torch.zeros(own, dtype=torch.int64))  # the target's id minus the own one
        if shape.markov is not None:
            self.markov_head = Markov(vocabulary, own or vocabulary, self.size, *shape.markov)
        if shape.selector is not None:
            self.candidate_selector = Selector(vocabulary, self.size, *shape.selector)
        if shape.confidence:
            rank = shape.markov[0] if shape.markov is not None and shape.confidence == "both" else 0
            self.confidence_head = Confidence(self.size + rank)

    @property
    def is_parallel(self) -> bool:
        """Whether no position's logits depend on the tokens before it."""
        return self.shape.markov is None and self.shape.selector is None

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.hidden_norm(self.fc(states)))

    def context(self, states: torch.Tensor, positions: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each layer's keys and values [1, kv_heads, N, head_dim] of the context's fused states [1, N, size]."""
        rotation = self.rotary(states, positions)
        for layer in self.layers:
            yield cast(BlockLayer, layer).context(states, rotation)

    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        """The normed states of a block's rows [1, N, size], of which only the embeddings are read."""
        rows = embedded * self.shape.embedding_scale
        rotation = self.rotary(rows, positions)
        for layer in self.layers:
            rows = layer(rows, position_embeddings=rotation, **others)
        return cast(torch.Tensor, self.norm(rows))

    def logits(self, states: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
        """The head's own logits [1, N, own vocabulary], before what `step` adds."""
        own = (lm_head if self.shape.draft_vocabulary is None else self.lm_head)(states) * self.shape.logit_scale
        cap = self.shape.softcap
        return cast(torch.Tensor, torch.tanh(own / cap) * cap if cap else own)

    def memory(self, anchor: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The memory [1, rank] of the rows before a block's first drafted one; `states` are the block's, [rows, size]."""
        if self.shape.markov is None:
            return states[:1, :0]
        empty = states.new_zeros(1, self.shape.markov[0])
        return empty if self.shape.from_anchor else self.markov_head.step(anchor, states[:1], empty)[1]

    def step(
        self, logits: torch.Tensor, states: torch.Tensor, tokens: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits [R, V] of drafted rows that follow tokens [R] and rows with `memory`, and their own memory.

        The rows have the own logits [R, own vocabulary] and the states [R, size].
        """
        if self.shape.markov is not None:
            added, memory = self.markov_head.step(tokens, states, memory)
            logits = logits + added
        if self.shape.draft_vocabulary is not None:
            own, logits = logits, logits.new_full((len(logits), self._vocabulary), -torch.inf)
            logits[:, torch.arange(own.shape[-1], device=own.device) + cast(torch.Tensor, self.d2t)] = own
        if self.shape.selector is not None:
            logits = self.candidate_selector(logits, states, tokens)
        return logits, memory

    def confidence(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
        """The predicted acceptance [R] of rows with the states [R, size] that follow tokens [R]; None = not predicted."""
        if not self.shape.confidence:
            return None
        known = [states] if self.shape.confidence == "states" else [states, self.markov_head.markov_w1(tokens)]
        return torch.sigmoid(self.confidence_head.proj(torch.cat(known, -1)))[:, 0]


def new_block_head(config: Mapping[str, Any], depth: int, vocabulary: int, has_bias: bool, path: str) -> BlockHead:
    """The network that a config.json describes, for a target with `depth` layers and `vocabulary` logits. Raises ModelError."""
    is_speculators = "speculators_model_type" in config
    given = dict(config["transformer_layer_config"] if is_speculators else config)
    found = AutoConfig.for_model(str(given.pop("model_type", "qwen3")), **{**given, "attention_bias": has_bias})
    rope = found.rope_parameters or {}
    found.rope_parameters = rope.get("sliding_attention", rope)
    shape = read_speculators(config, depth) if is_speculators else read_dflash(config, depth)
    set_windows(found, shape)
    found._attn_implementation = NAME
    if not 1 <= shape.drafted <= shape.rows <= MAX_NODES:
        raise ModelError(f"The head at {path!r} drafts blocks of {shape.rows} rows; at most {MAX_NODES} are supported.")
    if not all(0 <= layer < depth for layer in shape.layers_read):
        layers = ", ".join(map(str, shape.layers_read))
        raise ModelError(
            f"The head at {path!r} reads the inputs of layers {layers}, and this target has {depth} layers; use the head of"
            " this target, or one that does not read its last hidden state."
        )
    return BlockHead(found, shape, vocabulary)


def read_speculators(config: Mapping[str, Any], depth: int) -> BlockShape:
    """The layout of speculators. Raises KeyError if a value is missing."""
    kind, own = config["speculators_model_type"], config.get("draft_vocab_size")
    shape = BlockShape(
        layers_read=tuple(config.get("aux_hidden_state_layer_ids") or (2, depth // 2, depth - 3)),
        rows=int(config.get("block_size", 8)),
        mask_token=int(config["mask_token_id"]),
        from_anchor=bool(config.get("sample_from_anchor", kind == "dspark")),
        windows_both_ways=bool(config.get("sliding_window_non_causal", kind == "dflash2")),
        anchored_windows=True,
        draft_vocabulary=None if own in (None, config["vocab_size"]) else int(own),
    )
    if kind == "dflash2":
        return with_dflash2(shape, {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256} | dict(config))
    if kind == "dspark":
        rank, reads_both = int(config.get("markov_rank", 256)), config.get("confidence_head_with_markov", True)
        confidence = ("both" if reads_both else "states") if config.get("enable_confidence_head", True) else ""
        markov = (rank, str(config.get("markov_head_type", "vanilla"))) if rank else None
        return replace(shape, markov=markov, confidence=confidence)
    return shape


def read_dflash(config: Mapping[str, Any], depth: int) -> BlockShape:
    """The layout of dflash, whose layers are numbered by their outputs. Raises KeyError if a value is missing."""
    known = {**config, **(config.get("dflash_config") or {})}
    count, layers = int(config["num_hidden_layers"]), known.get("target_layer_ids")
    if layers is None:
        last = int(config.get("num_target_layers", depth)) - 3
        layers = [(last + 3) // 2] if count == 1 else [round(1 + place * (last - 1) / (count - 1)) for place in range(count)]
    is_causal = config.get("is_causal")
    shape = BlockShape(
        layers_read=tuple(layer + 1 for layer in layers),
        rows=int(known.get("block_size", 16)),
        mask_token=int(known["mask_token_id"]),
        full_both_ways=not is_causal,
        windows_both_ways=is_causal is False,
        embedding_scale=float(known.get("input_embedding_scale", 1.0)),
        logit_scale=float(known.get("output_multiplier", 1.0)),
        softcap=max(0.0, float(known.get("final_logit_softcapping") or 0)),
    )
    return with_dflash2(shape, known) if "selector_rank" in known else shape


def with_dflash2(shape: BlockShape, known: Mapping[str, Any]) -> BlockShape:
    convolution = (int(known["conv_kernel_size"]), int(known["conv_group_size"]))
    return replace(shape, convolution=convolution, selector=(int(known["selector_rank"]), int(known.get("selector_top_k", 16))))


def set_windows(config: PreTrainedConfig, shape: BlockShape) -> None:
    """Counts the windows of layers in a row's own position and those before it, as `Layer.window` does."""
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        config.sliding_window = (config.sliding_window or NO_WINDOW) + shape.anchored_windows
