"""Packs what a layer may have beside plain attention and feed-forward parts: latent attention, experts, and a state.

Latent attention attends to latents as they are (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

import ctypes
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.architecture.description import Latent, Layer, Mixture, Recurrence, State
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.packing import Packer, Size, order, stored_as
from outrider.verify.model.cpu.native.weights import PANEL
from outrider.verify.model.experts import expert_name
from outrider.verify.model.stored import Stored

# Names of tensors in files.
QUERY, KEY, VALUE, OUTPUT, FUSED = "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv"
LATENTS = QUERY_DOWN, QUERY_UP, QUERY_NORM, LATENT_KEY, LATENT_NORM, KEY_UP, VALUE_UP, BOTH_UP = (
    *("attn_q_a", "attn_q_b", "attn_q_a_norm", "attn_kv_a_mqa", "attn_kv_a_norm"),
    *("attn_k_b", "attn_v_b", "attn_kv_b"),
)
ROUTER, ROUTER_SCALE, ROUTER_BIAS, SHARED_GATE = "ffn_gate_inp", "ffn_gate_inp.scale", "exp_probs_b.bias", "ffn_gate_inp_shexp"
EXPERT_SCALES = "ffn_down_exps.scale"
# Of a mixture beside a dense part.
NORMS = {"norm": "pre_ffw_norm_2", "post_norm": "post_ffw_norm_2", "shared_post_norm": "post_ffw_norm_1"}
STATES = STATE_INPUT, STATE_OUTPUT, STATE_NORM, CONVOLUTION = "ssm_in", "ssm_out", "ssm_norm", "ssm_conv1d"
VECTORS = DECAY, SKIP, STEP = "ssm_a", "ssm_d", "ssm_dt"
DELTAS = STATE_GATE, ALPHA, BETA, BOTH = "attn_gate", "ssm_alpha", "ssm_beta", "ssm_ba"
CONVOLUTIONS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
# Through few values.
STEPS, GATES = ("ssm_f_a", "ssm_f_b"), ("ssm_g_a", "ssm_g_b")
SHORTS = SHORT_INPUT, SHORT_OUTPUT, SHORT = "shortconv.in_proj", "shortconv.out_proj", "shortconv.conv"
NAMES = (*LATENTS, ROUTER, SHARED_GATE, *NORMS.values(), *(name.rpartition(".")[0] for name in (ROUTER_BIAS, EXPERT_SCALES)))
NAMES += (*STATES, *VECTORS, *DELTAS, *SHORTS, *CONVOLUTIONS, *STEPS, *GATES)
# What is normed are multiples of this, and outputs of a head are whole panels.
SUMMED = 16
# A recurrent layer's linear layers, the names of its output and its convolutions, and the order of the channels.
Parts = tuple[dict[str, structures.Linear], str, tuple[str, ...], NDArray[np.int64]]


def fits(known: Latent) -> bool:
    """Whether the library computes latents of these sizes."""
    return known.rank % PANEL == known.value_dim % PANEL == known.key_dim % 2 == known.query_rank % SUMMED == 0


def pack_latent(packer: Packer, place: str, layer: Layer) -> dict[str, Any]:
    """Attention of a layer, whose tensors' names begin with `place`. Raises ModelError."""
    known, hidden, heads = layer.latent, packer.architecture.hidden, layer.heads
    assert known is not None
    keys, values = ups(packer, place, heads, known)
    found = structures.Latent(
        key_up=structures.Linear(packer.matrix(place + KEY_UP, keys, (heads * known.rank, known.key_dim))),
        value_up=structures.Linear(packer.matrix(place + VALUE_UP, values, (heads * known.value_dim, known.rank))),
    )
    query, read = QUERY, hidden
    if known.query_rank:
        found.query_down = packer.linear(place + QUERY_DOWN, (known.query_rank, hidden))
        found.query_norm = packer.norm(place + QUERY_NORM, known.query_rank)
        query, read = QUERY_UP, known.query_rank
    packer.kept.append(found)
    width = known.key_dim + layer.head_dim - known.rank
    has_pairs = packer.architecture.has_pairs
    return {
        "latent": ctypes.pointer(found),
        "query": packer.linear(place + query, (heads * width, read), order(packer.architecture, layer, "query", has_pairs)),
        "key": packer.linear(place + LATENT_KEY, (layer.head_dim, hidden), order(packer.architecture, layer, "key", has_pairs)),
        "key_norm": packer.norm(place + LATENT_NORM, known.rank),
        "output": packer.linear(place + OUTPUT, (hidden, heads * known.value_dim)),
    }


def ups(packer: Packer, place: str, heads: int, known: Latent) -> tuple[Stored, Stored]:
    """The weights of keys, transposed, [heads * rank, key_dim], and of values, [heads * value_dim, rank].

    Checkpoints and older files have both in one tensor, [heads * (key_dim + value_dim), rank].
    """
    if not packer.has(place + BOTH_UP):
        keys, values = (packer.tensors[f"{place}{name}.weight"] for name in (KEY_UP, VALUE_UP))
        return flat(keys), flat(values)
    both = packer.tensors[f"{place}{BOTH_UP}.weight"]
    packer.check(place + BOTH_UP, both, (heads * (known.key_dim + known.value_dim), known.rank))
    rows = np.arange(len(both.rows)).reshape(heads, -1)
    keys, values = (both.take(part.reshape(-1)) for part in (rows[:, : known.key_dim], rows[:, known.key_dim :]))
    columns = keys.floats().reshape(heads, known.key_dim, known.rank).swapaxes(1, 2)
    return stored_as(keys, columns.reshape(-1, known.key_dim)), values


def flat(stored: Stored) -> Stored:
    """All but the last dimension as one."""
    return replace(stored, shape=(prod(stored.shape[:-1]), stored.shape[-1]))


def pack_mixture(packer: Packer, number: int, known: Mixture) -> structures.Mixture:
    """The experts of a layer. Raises ModelError."""
    place, hidden = f"blk.{number}.", packer.architecture.hidden
    counted, packer.size = packer.size, Size()  # a step reads those that it uses
    experts = [each for expert in range(known.experts) for each in pack_expert(packer, number, expert)]
    counted.nbytes += packer.size.nbytes * known.used // known.experts
    counted.weights += packer.size.weights * known.used // known.experts
    packer.size = counted
    array = (structures.Linear * len(experts))(*experts)
    norms = {name: packer.norm(place + stored, hidden) for name, stored in NORMS.items()}
    if place + ROUTER_SCALE in packer.tensors:
        norms["router_norm"] = packer.plain_norm(packer.floats(place + ROUTER_SCALE, hidden) * np.float32(hidden**-0.5))
    mixture = structures.Mixture(
        **norms,
        scales=packer.vector(place + EXPERT_SCALES, known.experts),
        router=packer.router(place + ROUTER, known.experts),
        bias=packer.vector(place + ROUTER_BIAS, known.experts),
        experts=ctypes.cast(array, ctypes.POINTER(structures.Linear)),
        shared_gate=packer.router(place + SHARED_GATE, 1) if packer.has(place + SHARED_GATE) else structures.Linear(),
        count=known.experts,
        used=known.used,
        scores=known.scores.value,
        normalized=known.normalizes,
        groups=known.groups,
        used_groups=known.used_groups,
        summed=known.summed,
        scale=known.scale,
    )
    packer.kept += [array, mixture]
    return mixture


def pack_expert(packer: Packer, layer: int, number: int) -> list[structures.Linear]:
    """Gate, up and down. Raises ModelError."""
    hidden = packer.architecture.hidden
    gate, up, down = (expert_name(layer, part, number).removesuffix(".weight") for part in ("gate", "up", "down"))
    inner = packer.tensors[f"{down}.weight"].shape[1]
    first = packer.linear(gate, (inner, hidden)) if packer.has(gate) else structures.Linear()
    return [first, packer.linear(up, (inner, hidden)), packer.linear(down, (hidden, inner))]


def pack_recurrence(packer: Packer, place: str, number: int, known: Recurrence) -> structures.Recurrence:
    """A recurrent layer, whose tensors' names begin with `place`. Raises ModelError."""
    before = [each.recurrence for each in packer.architecture.layers[:number] if each.recurrence is not None]
    hidden, inner, keys = packer.architecture.hidden, known.heads * known.value_dim, known.key_heads * known.key_dim
    found = structures.Recurrence(
        kind=known.kind.value,
        window=known.window,
        channels=hidden if known.kind is State.CONVOLUTION else 2 * keys + inner,
        heads=known.heads,
        key_heads=known.key_heads,
        key_dim=known.key_dim,
        value_dim=known.value_dim,
        decay_dim=known.decay_dim,
        activation=known.activation.value,
        tiled=known.is_tiled,
        normed_gated=known.gates_first,
        convolution=len(before),
        state=len(before),
        least=known.steps[0],
        most=known.steps[1],
        reach=known.reach,
        epsilon=known.epsilon or packer.architecture.epsilon,
    )
    source = {State.CONVOLUTION: short, State.DELTA_RULE: delta, State.STATE_SPACE: space}[known.kind]
    if known.kind is State.DELTA_RULE and packer.has(place + QUERY):
        source = separate
    linears, output, convolutions, order = source(packer, place, known)
    for name, linear in linears.items():
        setattr(found, name, linear)
    found.output = packer.linear(place + output, (hidden, inner or hidden), None, packer.multiplier("state output"))
    taps = packer.floats([f"{place}{name}.weight" for name in convolutions], found.channels * (known.window + 1))
    found.taps = packer.keep(taps.reshape(found.channels, -1)[order].T)
    if f"{place}{convolutions[0]}.bias" in packer.tensors:
        found.bias = packer.keep(packer.floats(f"{place}{convolutions[0]}.bias", found.channels)[order])
    if known.kind is State.CONVOLUTION:
        return found
    decay = packer.floats(f"{place}{DECAY}.weight", known.heads)
    found.decay = packer.keep(-np.exp(decay) if packer.architecture.decays_as_logarithms else decay)
    found.step_bias = packer.keep(packer.floats(f"{place}{STEP}.bias", known.heads * known.decay_dim))
    found.skip = packer.vector(f"{place}{SKIP}.weight", known.heads)
    if packer.has(place + STATE_NORM):
        size = known.value_dim if known.kind is State.DELTA_RULE else inner // known.key_heads
        whole = size if known.kind is State.DELTA_RULE else inner
        weight = packer.keep(packer.floats(f"{place}{STATE_NORM}.weight", whole))
        found.norm = structures.Norm(weight, None, packer.architecture.norm.value, size)
    return found


def short(packer: Packer, place: str, known: Recurrence) -> Parts:
    """LFM2's: what is convolved is multiplied by `beta`, and the result by `gate`."""
    hidden = packer.architecture.hidden
    parts = {name: slice(part * hidden, (part + 1) * hidden) for part, name in enumerate(("beta", "gate", "convolved"))}
    linears = {name: packer.linear(place + SHORT_INPUT, (hidden, hidden), rows) for name, rows in parts.items()}
    return linears, SHORT_OUTPUT, (SHORT,), np.arange(hidden)


def delta(packer: Packer, place: str, known: Recurrence) -> Parts:
    """Qwen's: four tensors, or two whose rows are those of one key head after another."""
    hidden, inner, keys = packer.architecture.hidden, known.heads * known.value_dim, known.key_heads * known.key_dim
    channels, ratio = 2 * keys + inner, known.heads // known.key_heads
    if packer.has(place + FUSED):
        rows: dict[str, Any] = {"convolved": (FUSED, None), "gate": (STATE_GATE, None)}
    else:
        sizes = np.cumsum([0, known.key_dim, known.key_dim, ratio * known.value_dim, ratio * known.value_dim])
        fused = np.arange(channels + inner).reshape(known.key_heads, -1)
        query, key, value, gate = (fused[:, start:end].reshape(-1) for start, end in pairwise(sizes))
        rows = {"convolved": (STATE_INPUT, np.r_[query, key, value]), "gate": (STATE_INPUT, gate)}
    if packer.has(place + BOTH):
        pairs = np.arange(2 * known.heads).reshape(known.key_heads, 2, ratio)
        rows |= {name: (BOTH, pairs[:, part].reshape(-1)) for part, name in enumerate(("beta", "step"))}
    else:
        rows |= {"beta": (BETA, None), "step": (ALPHA, None)}
    outputs = {"convolved": channels, "gate": inner, "beta": known.heads, "step": known.heads}
    linears = {name: packer.linear(place + source, (outputs[name], hidden), each) for name, (source, each) in rows.items()}
    return linears, STATE_OUTPUT, (CONVOLUTION,), np.arange(channels)


def separate(packer: Packer, place: str, known: Recurrence) -> Parts:
    """Kimi Linear's and OLMo Hybrid's: queries, keys and values apart. Kimi's gates and steps go through few values."""
    hidden, inner, keys = packer.architecture.hidden, known.heads * known.value_dim, known.key_heads * known.key_dim
    shapes = {
        "convolved": (QUERY, keys, hidden),
        "keys": (KEY, keys, hidden),
        "values": (VALUE, inner, hidden),
        "beta": (BETA, known.heads, hidden),
    }
    if known.decay_dim > 1:
        shapes |= {
            "gate_down": (GATES[0], known.value_dim, hidden),
            "gate": (GATES[1], inner, known.value_dim),
            "step_down": (STEPS[0], known.key_dim, hidden),
            "step": (STEPS[1], known.heads * known.decay_dim, known.key_dim),
        }
    else:
        shapes |= {"gate": (STATE_GATE, inner, hidden), "step": (ALPHA, known.heads, hidden)}
    linears = {name: packer.linear(place + source, (outputs, inputs)) for name, (source, outputs, inputs) in shapes.items()}
    return linears, OUTPUT, (CONVOLUTION,) if packer.has(place + CONVOLUTION) else CONVOLUTIONS, np.arange(2 * keys + inner)


def space(packer: Packer, place: str, known: Recurrence) -> Parts:
    """Mamba 2's: the gate, values, keys and queries of all groups, and steps in one tensor."""
    hidden, inner, keys = packer.architecture.hidden, known.heads * known.value_dim, known.key_heads * known.key_dim
    ends = np.cumsum([0, inner, inner, keys, keys, known.heads])
    gate, value, key, query, step = (np.arange(start, end) for start, end in pairwise(ends))
    order = np.r_[query, key, value]
    scales = np.repeat([packer.multiplier(name) for name in ("queries", "keys", "values")], [keys, keys, inner])
    given: dict[str, tuple[Any, Any]] = {
        "convolved": (order, scales.astype(np.float32)[:, None] if packer.architecture.multipliers else 1.0),
        "gate": (gate, packer.multiplier("state gate")),
        "step": (step, packer.multiplier("step")),
    }
    linears = {
        name: packer.linear(place + STATE_INPUT, (len(rows), hidden), rows, scale) for name, (rows, scale) in given.items()
    }
    return linears, STATE_OUTPUT, (CONVOLUTION,), order - inner
