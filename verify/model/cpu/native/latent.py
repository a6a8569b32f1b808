"""Packs latent attention for the library, which attends to latents as they are (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from outrider.verify.model.architecture.description import Latent, Layer
from outrider.verify.model.cpu.native import structures
from outrider.verify.model.cpu.native.packing import Packer, order, stored_as
from outrider.verify.model.cpu.native.weights import PANEL
from outrider.verify.model.stored import Stored

# Names of tensors in files.
QUERY, QUERY_DOWN, QUERY_UP, QUERY_NORM = "attn_q", "attn_q_a", "attn_q_b", "attn_q_a_norm"
KEY, KEY_NORM, OUTPUT = "attn_kv_a_mqa", "attn_kv_a_norm", "attn_output"
KEY_UP, VALUE_UP, BOTH_UP = "attn_k_b", "attn_v_b", "attn_kv_b"
NAMES = (QUERY, QUERY_DOWN, QUERY_UP, QUERY_NORM, KEY, KEY_NORM, OUTPUT, KEY_UP, VALUE_UP, BOTH_UP)
# What is normed are multiples of this, and outputs of a head are whole panels.
SUMMED = 16


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
        "key": packer.linear(place + KEY, (layer.head_dim, hidden), order(packer.architecture, layer, "key", has_pairs)),
        "key_norm": packer.norm(place + KEY_NORM, known.rank),
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
