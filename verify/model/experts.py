"""The weights of experts and of several residuals, one tensor for each: checkpoints and files may store them in one tensor."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
from gguf import GGMLQuantizationType

from outrider.verify.model.stored import Stored, halved

# Of one expert, in a checkpoint.
SINGLE = re.compile(r"\.layers\.(\d+)\..*\bexperts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(weight|bias)$")
# Of all experts of a layer.
FUSED = re.compile(
    r"\.layers\.(\d+)\..*\b(experts\.gate_up_proj|experts\.up_proj|experts\.down_proj"
    r"|block_sparse_moe\.input_linear\.weight|block_sparse_moe\.output_linear\.weight)$"
)
FUSED_BIAS = re.compile(r"\.layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj)_bias$")
# A shared expert, whose gate and up are one tensor.
SHARED = re.compile(r"\.layers\.(\d+)\..*\bshared_mlp\.input_linear\.weight$")
# Queries, keys and values that are convolved.
CONVOLUTIONS = re.compile(r"(\.self_attn\.)(conv1d\.weight)$")
PACKED = re.compile(r"(\.layers\.(\d+)\..*\bexperts\.(gate_up_proj|down_proj))_blocks$")
IN_FILE = re.compile(r"^blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")
# Of all residuals but the first.
RESIDUALS = re.compile(r"^altup_(unembd_)?proj\.weight$")
PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


def expert_name(layer: int | str, part: str, expert: int | str, kind: str = "weight") -> str:
    return f"blk.{layer}.ffn_{part}_exps.{expert}.{kind}"


def split_file(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The tensors of a GGUF file, those of experts apart."""
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        match = IN_FILE.match(name)
        if RESIDUALS.match(name):
            found |= {f"{name.removesuffix('weight')}{number}.weight": each for number, each in enumerate(each_expert(stored))}
        elif match is None:
            found[name] = stored
        elif match[2] == "gate_up":
            found |= apart(match[1], each_expert(stored), False, False, match[3])
        else:
            found |= {expert_name(match[1], match[2], at, match[3]): each for at, each in enumerate(each_expert(stored))}
    return found


def split_checkpoint(tensors: Mapping[str, Stored], is_turned: bool) -> dict[str, Stored]:
    """The tensors of a checkpoint, those of experts apart and by their names here.

    With `is_turned`, as in gpt-oss, fused weights are [experts, inputs, outputs], and outputs of gate and up take turns.
    """
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if (match := SINGLE.search(name)) is not None:
            found[expert_name(match[1], PARTS[match[3]], match[2], match[4])] = stored
        elif (match := SHARED.search(name)) is not None:
            half = stored.shape[0] // 2
            found[f"blk.{match[1]}.ffn_gate_shexp.weight"] = stored.take(slice(0, half))
            found[f"blk.{match[1]}.ffn_up_shexp.weight"] = stored.take(slice(half, None))
        elif (match := CONVOLUTIONS.search(name)) is not None:
            third = stored.shape[0] // 3
            for number, part in enumerate("qkv"):
                rows = slice(number * third, (number + 1) * third)
                found[CONVOLUTIONS.sub(rf"\1{part}_\2", name)] = stored.take(rows)
        elif (match := FUSED.search(name)) is not None and "experts.up_proj" in name:
            found |= {expert_name(match[1], "up", number): each for number, each in enumerate(each_expert(stored))}
        elif match is not None:
            is_down = "down" in match[2] or "output" in match[2]
            experts = (turned(each) for each in each_expert(stored)) if is_turned else each_expert(stored)
            found |= apart(match[1], experts, is_down, is_turned, "weight")
        elif (match := FUSED_BIAS.search(name)) is not None:
            found |= apart(match[1], each_expert(stored), match[2] == "down_proj", is_turned, "bias")
        elif (match := PACKED.search(name)) is not None:
            scales = tensors[name.removesuffix("_blocks") + "_scales"]
            found |= apart(match[2], each_expert(mxfp4(stored, scales)), match[3] == "down_proj", is_turned, "weight")
        elif not name.endswith(("_proj_scales",)):
            found[name] = stored
    return found


def each_expert(stored: Stored) -> Iterator[Stored]:
    """The parts of a tensor whose first dimension are experts."""
    count, *shape = stored.shape
    if len(shape) == 1:
        return (replace(stored, rows=row[None], shape=tuple(shape)) for row in stored.rows)
    rows = stored.rows.reshape(count, shape[0], -1)
    return (replace(stored, rows=each, shape=tuple(shape)) for each in rows)


def apart(layer: str, experts: Iterator[Stored], is_down: bool, in_turns: bool, kind: str) -> dict[str, Stored]:
    """Experts by name; gate and up in halves, or in turns."""
    found = {}
    for number, expert in enumerate(experts):
        if is_down:
            found[expert_name(layer, "down", number, kind)] = expert
            continue
        half = expert.shape[0] // 2
        gate, up = (slice(0, None, 2), slice(1, None, 2)) if in_turns else (slice(0, half), slice(half, None))
        found[expert_name(layer, "gate", number, kind)] = expert.take(gate)
        found[expert_name(layer, "up", number, kind)] = expert.take(up)
    return found


def turned(stored: Stored) -> Stored:
    """A matrix of floats, its rows as columns."""
    size = stored.rows.shape[1] // stored.shape[1]
    values = stored.rows.view(f"V{size}").reshape(stored.shape)
    rows = np.ascontiguousarray(values.T).view(np.uint8).reshape(stored.shape[1], -1)
    return Stored(rows, stored.type, stored.shape[::-1])


def mxfp4(blocks: Stored, scales: Stored) -> Stored:
    """Blocks of gpt-oss's checkpoints as GGUF files have them: the scale first, and the halves of a block side by side."""
    shape = blocks.shape[:-2]
    rows = np.concatenate([scales.rows.reshape(-1, 1), halved(blocks.rows, 32)], 1)
    inputs = blocks.shape[-2] * 32
    return Stored(rows.reshape(int(np.prod(shape)), -1), GGMLQuantizationType.MXFP4, (*shape, inputs))
