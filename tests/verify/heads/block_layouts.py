"""Block heads with random weights in the published layouts, and their drafts by plain attention over the whole text."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn.functional import rms_norm, silu

from tests.verify.model.families import SIZES

MASK, ROWS, WINDOW, OWN_VOCABULARY = 5, 6, 11, 60
SIZE, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCABULARY = 32, 4, 2, 8, 64, SIZES["vocab_size"]
INNER_CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": SIZE,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
Weights = dict[str, torch.Tensor]
# Whether the row at a position reads the key at another one, both [N, M]; the anchor's position.
Sees = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """A published layout, and what a head in it computes."""

    config: dict[str, Any]
    sees: Sees  # in the first layer, which has a window; the other one sees everything
    reads: tuple[int, int] = (1, 4)  # inputs of the target's layers
    from_anchor: bool = False
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of more tensors
    markov: str = ""
    top_k: int = 0
    scale: tuple[float, float, float] = (1.0, 1.0, 0.0)  # of embeddings and logits, and the logits' bound


def by_row(row: torch.Tensor, key: torch.Tensor, _: int) -> torch.Tensor:
    return (key <= row) & (row - key < WINDOW)


def from_anchor(row: torch.Tensor, key: torch.Tensor, anchor: int) -> torch.Tensor:
    return (key <= row) & (key >= anchor - WINDOW)


def dflash(architecture: str, **values: Any) -> dict[str, Any]:
    known = {"mask_token_id": MASK, "block_size": ROWS, "target_layer_ids": [0, 3], **values}
    return {"architectures": [architecture], "model_type": "qwen3", **INNER_CONFIG, "dflash_config": known}


def speculators(kind: str, **values: Any) -> dict[str, Any]:
    known = {"speculators_model_type": kind, "block_size": ROWS, "mask_token_id": MASK, "aux_hidden_state_layer_ids": [1, 4]}
    inner = {"transformer_layer_config": {"model_type": "qwen3", **INNER_CONFIG}}
    return {**known, **inner, "draft_vocab_size": VOCABULARY, **values}


def dspark(markov: str, **values: Any) -> dict[str, Any]:
    return speculators("dspark", draft_vocab_size=OWN_VOCABULARY, markov_rank=4, markov_head_type=markov, **values)


CONVOLUTIONS = {
    f"layers.{layer}.{name}_conv.{part}": shape
    for layer in range(2)
    for name in ("attention", "mlp")
    for part, shape in {"base_kernel": (2, 2, SIZE), "kernel_projection.weight": (16, SIZE)}.items()
}
SELECTOR = {f"candidate_selector.{name}_codebook": (VOCABULARY, 6) for name in ("predecessor", "successor")}
DFLASH2 = {**CONVOLUTIONS, **SELECTOR, "candidate_selector.hidden_projection.weight": (6, SIZE)}
DFLASH2_VALUES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
OWN: dict[str, tuple[int, ...]] = {"lm_head.weight": (OWN_VOCABULARY, SIZE)}
MARKOV = {**OWN, "markov_head.markov_w1.weight": (VOCABULARY, 4), "markov_head.markov_w2.weight": (OWN_VOCABULARY, 4)}
GATED = {**MARKOV, "markov_head.gate_proj.weight": (4, SIZE + 4), "markov_head.gate_proj.bias": (4,)}
RNN = {**MARKOV, "markov_head.joint_proj.weight": (12, SIZE + 8), "markov_head.joint_proj.bias": (12,)}
SURE = {"confidence_head.proj.weight": (1, SIZE + 4), "confidence_head.proj.bias": (1,)}
SCALED = {"input_embedding_scale": 3.0, "output_multiplier": 0.7, "final_logit_softcapping": 5.0}
LAYOUTS = {
    "dflash": Layout(dflash("DFlashDraftModel", **SCALED), by_row, scale=(3.0, 0.7, 5.0)),
    "dflash 2": Layout(dflash("DFlash2DraftModel", **DFLASH2_VALUES), by_row, shapes=DFLASH2, top_k=5),
    "speculators dflash": Layout(speculators("dflash", draft_vocab_size=OWN_VOCABULARY), from_anchor, shapes=OWN),
    "speculators dflash2": Layout(
        speculators("dflash2", **DFLASH2_VALUES), lambda row, key, anchor: key >= anchor - WINDOW, shapes=DFLASH2, top_k=5
    ),
    "speculators dspark": Layout(dspark("vanilla"), from_anchor, from_anchor=True, shapes={**MARKOV, **SURE}, markov="vanilla"),
    "gated": Layout(dspark("gated", enable_confidence_head=False), from_anchor, (1, 4), True, GATED, "gated"),
    "rnn": Layout(dspark("rnn", sample_from_anchor=False), from_anchor, shapes={**RNN, **SURE}, markov="rnn"),
}


def save_block(folder: Path, layout: Layout, **changed: Any) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (SIZE, 2 * SIZE), "norm.weight": (SIZE,), "hidden_norm.weight": (SIZE,)}
    for layer in ("layers.0.", "layers.1."):
        for name, width in {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}.items():
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (width * HEAD_DIM, SIZE)
        shapes[f"{layer}self_attn.o_proj.weight"] = (SIZE, HEADS * HEAD_DIM)
        shapes |= {f"{layer}self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        shapes |= {f"{layer}mlp.{name}_proj.weight": (INNER, SIZE) for name in ("gate", "up")}
        shapes |= {f"{layer}mlp.down_proj.weight": (SIZE, INNER)}
        shapes |= {f"{layer}{name}_layernorm.weight": (SIZE,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(4)
    drawn = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in (shapes | layout.shapes).items()}
    weights = {name: 1 + tensor if "norm" in name else tensor for name, tensor in drawn.items()}
    if "lm_head.weight" in weights:
        weights["d2t"] = torch.arange(OWN_VOCABULARY) // 2
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(layout.config | changed))
    save_file(weights, folder / "model.safetensors")
    return weights


@torch.no_grad()
def drafts(layout: Layout, weights: Weights, target: Any, text: list[int]) -> list[int]:
    """The greedy draft after a text. `target` is a transformers model."""
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    context = torch.cat([states[layer][0, :-1] for layer in layout.reads], -1) @ weights["fc.weight"].T
    context, anchor = normal(context, weights["hidden_norm.weight"]), len(text) - 1
    rows = layout.scale[0] * target.get_input_embeddings()(torch.tensor([text[-1], *[MASK] * (ROWS - 1)]))
    for number in range(2):
        own = {name.removeprefix(f"layers.{number}."): tensor for name, tensor in weights.items()}
        read = normal(rows, own["input_layernorm.weight"])
        read, kernels = convolved(read, own, "attention")
        attended = attention(read, context, own, anchor, layout.sees if number == 0 else lambda row, key, _: key >= 0)
        rows = rows + second(attended, own, "attention", kernels)
        read, kernels = convolved(normal(rows, own["post_attention_layernorm.weight"]), own, "mlp")
        inner = silu(read @ own["mlp.gate_proj.weight"].T) * (read @ own["mlp.up_proj.weight"].T)
        rows = rows + second(inner @ own["mlp.down_proj.weight"].T, own, "mlp", kernels)
    rows = normal(rows, weights["norm.weight"])
    return chosen(layout, weights, rows, rows @ weights.get("lm_head.weight", target.lm_head.weight).T, text[-1])


def normal(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return rms_norm(rows, rows.shape[-1:], weight, 1e-6)


def turned(rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows [N, heads, head_dim] rotated by their positions."""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = rows.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def attention(rows: torch.Tensor, context: torch.Tensor, own: Weights, anchor: int, sees: Sees) -> torch.Tensor:
    places = torch.arange(anchor + len(rows))
    read = torch.cat([context, rows])
    query, key, value = (
        (source @ own[f"self_attn.{name}_proj.weight"].T).view(len(source), -1, HEAD_DIM)
        for source, name in ((rows, "q"), (read, "k"), (read, "v"))
    )
    query = turned(normal(query, own["self_attn.q_norm.weight"]), places[anchor:])
    key = turned(normal(key, own["self_attn.k_norm.weight"]), places)
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (key, value))
    scores = torch.einsum("nhd,mhd->hnm", query, key) / HEAD_DIM**0.5
    scores = scores.masked_fill(~sees(places[anchor:, None], places[None].expand(len(rows), -1), anchor), -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), value).flatten(1) @ own["self_attn.o_proj.weight"].T


def convolved(rows: torch.Tensor, own: Weights, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows after the convolution before a part, and the kernels of both; without convolutions, the rows."""
    if f"{name}_conv.base_kernel" not in own:
        return rows, None
    added = (rows @ own[f"{name}_conv.kernel_projection.weight"].T).view(len(rows), 2, 2, 4).repeat_interleave(8, -1)
    kernels = own[f"{name}_conv.base_kernel"] + added  # [N, 2, taps, SIZE]
    return second(rows, own, name, kernels, 0), kernels


def second(rows: torch.Tensor, own: Weights, name: str, kernels: torch.Tensor | None, side: int = 1) -> torch.Tensor:
    if kernels is None:
        return rows
    earlier = torch.cat([torch.zeros(1, SIZE), rows[:-1]])
    return rows * kernels[:, side, 0] + earlier * kernels[:, side, 1]


def chosen(layout: Layout, weights: Weights, rows: torch.Tensor, logits: torch.Tensor, anchor: int) -> list[int]:
    """The greedy path through a block's logits."""
    _, scale, cap = layout.scale
    logits = torch.tanh(logits * scale / cap) * cap if cap else logits * scale
    found, last, state = list[int](), anchor, torch.zeros(4)
    for number, (row, own) in enumerate(zip(rows, logits, strict=True)):
        if layout.markov:
            before = weights["markov_head.markov_w1.weight"][last]
            if layout.markov == "gated":
                given = torch.cat([row, before])
                gate = weights["markov_head.gate_proj.weight"] @ given + weights["markov_head.gate_proj.bias"]
                before = gate.sigmoid() * before
            if layout.markov == "rnn":
                given = torch.cat([state, before, row])
                gate, new, out = (
                    weights["markov_head.joint_proj.weight"] @ given + weights["markov_head.joint_proj.bias"]
                ).chunk(3)
                state, before = gate.sigmoid() * state + (1 - gate.sigmoid()) * new.tanh(), out.tanh()
            own = own + weights["markov_head.markov_w2.weight"] @ before
        if number == 0 and not layout.from_anchor:
            continue
        if layout.top_k:
            best, ids = own.topk(layout.top_k)
            given = weights["candidate_selector.predecessor_codebook"][last]
            given = given * (weights["candidate_selector.hidden_projection.weight"] @ row)
            last = int(ids[(best + weights["candidate_selector.successor_codebook"][ids] @ given).argmax()])
        else:
            last = int(own.argmax())
            last += last // 2 if "d2t" in weights else 0
        found.append(last)
    return found
