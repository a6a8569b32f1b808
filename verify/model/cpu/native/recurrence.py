"""Packs recurrent layers for the library, whatever families store them like."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.model.architecture.description import Recurrence, State
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.packing import Packer

# Names of tensors in files.
STATE_INPUT, STATE_OUTPUT, STATE_NORM, CONVOLUTION = "ssm_in", "ssm_out", "ssm_norm", "ssm_conv1d"
DECAY, SKIP, STEP, STATE_GATE, ALPHA, BETA, BOTH = "ssm_a", "ssm_d", "ssm_dt", "attn_gate", "ssm_alpha", "ssm_beta", "ssm_ba"
CONVOLUTIONS = ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")
# Through few values.
STEPS, GATES = ("ssm_f_a", "ssm_f_b"), ("ssm_g_a", "ssm_g_b")
SHORT_INPUT, SHORT_OUTPUT, SHORT = "shortconv.in_proj", "shortconv.out_proj", "shortconv.conv"
NAMES = (
    STATE_INPUT,
    STATE_OUTPUT,
    STATE_NORM,
    CONVOLUTION,
    DECAY,
    SKIP,
    STEP,
    STATE_GATE,
    ALPHA,
    BETA,
    BOTH,
    SHORT_INPUT,
    SHORT_OUTPUT,
    SHORT,
    *CONVOLUTIONS,
    *STEPS,
    *GATES,
)
FUSED = "attn_qkv"
QUERY, KEY, VALUE, OUTPUT = "attn_q", "attn_k", "attn_v", "attn_output"
# A recurrent layer's linear layers, the names of its output and its convolutions, and the order of the channels.
Parts = tuple[dict[str, structures.Linear], str, tuple[str, ...], NDArray[np.int64]]


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
    taps = packer.joined([f"{place}{name}.weight" for name in convolutions], found.channels * (known.window + 1))
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
