"""What compiled kernels use on each generation of GPUs: hardly anything is spilled in bfloat16, and each launch fits.

A spilled register costs a trip to memory for each block of keys, and a kernel with too much shared memory does not launch.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from outrider.verify.model.gpu.text_work import SPLIT_KEYS, SPLITS_PER_SIZE, attend_blocks, split_count
from outrider.verify.model.gpu.triton_attention import OWN_STAGES, own_limits
from outrider.verify.model.gpu.triton_experts import ADDED_ROWS, stages_of, work_of
from outrider.verify.model.gpu.triton_experts import OUTPUTS as EXPERT_OUTPUTS
from outrider.verify.model.gpu.triton_products import AHEAD, INPUTS, Gpu, Tile, splits_of
from outrider.verify.model.gpu.triton_sampling import BLOCK, CHOICE_BLOCK, CHOICE_WARPS, LOW_BITS, SLOTS, WARPS
from tests.verify.model.gpu.compiled.compiling import GFX942, LOCAL_BYTES, SHARED_BYTES, Variant, usages

pytestmark = pytest.mark.slow
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CACHES = {"auto": None, "int8": "i8", "fp8": "u8"}
ROWS = 256
GROUPS = 4
# Bytes of a thread that kernels may spill: a number outside loops; more in float32, with keys of 8 bits, windows, or filters.
NUMBER_BYTES, FEW_BYTES = 8, 24


def attention(
    capability: int, dtype: torch.dtype, head_dim: int, cache: str = "auto", window: int = 0, rows: int = ROWS
) -> list[Variant]:
    """The kernels of tree attention of a model of GROUPS query heads for each key head, and 131,072 positions."""
    kind = TYPES[dtype]
    kinds = {name: "*i64" for name in ("rows", "tables")} | {"scaling": "fp32", "softcap": "fp32"}
    kinds |= dict.fromkeys(("query", "key", "value", "sinks", "out"), f"*{kind}")
    kinds |= dict.fromkeys(("parts_out", "lse"), "*fp32") | {"pool": f"*{CACHES[cache] or kind}"}
    sizes = {"head_dim": head_dim, "padded_dim": head_dim, "size": ROWS, "page_tokens": 256}
    parts = split_count(131_072, SPLIT_KEYS)
    splits = {"block": 64, "split_keys": SPLIT_KEYS, "splits_per_size": SPLITS_PER_SIZE, "parts": parts}
    scores = {"groups": GROUPS, "window": window, "capped": window > 0}
    blocks = attend_blocks(GROUPS * rows, head_dim, dtype, capability)
    registers = own_limits(16, head_dim, dtype, 1 if CACHES[cache] else dtype.itemsize, capability).get("maxnreg")
    text = {"block_rows": blocks[0], "block_keys": blocks[1]}
    own = {"own_rows": 16, "own_keys": blocks[1], "has_sinks": window > 0}
    pdl = {"pdl": capability >= 90}
    kinds |= dict.fromkeys(("query_gain", "key_gain", "turned"), f"*{kind}") | {
        "angles": "*fp32",
        "positions": "*i64",
        "epsilon": "fp32",
    }
    rotations = [{"kv_heads": 8, "rotary_dim": dim, "has_gains": dim > 0} for dim in (0, head_dim)]
    sizes |= pdl
    return [
        Variant(capability, "kernels", "attend_text", kinds, {**scores, **sizes, **splits, **text}),
        Variant(capability, "kernels", "attend_own", kinds, {**scores, **sizes, **splits, **own}, 4, OWN_STAGES, registers),
        *(Variant(capability, "writing_kernels", "write", kinds, sizes | each) for each in rotations),
    ]


def products(capability: int, dtype: torch.dtype, bits: int = 16, levels: int = -1, epilogue: int = 0) -> list[Variant]:
    """The kernel of linear layers, for few and many rows and outputs; `levels` and `epilogue` as there."""
    kinds = dict.fromkeys(("rows", "weight", "bias", "out"), f"*{TYPES[dtype]}") | {"partial": "*fp32", "arrived": "*i32"}
    kinds |= dict.fromkeys(("residual", "gain", "gained"), f"*{TYPES[dtype]}") | dict.fromkeys(("sums", "next_sums"), "*fp32")
    kinds |= {"epsilon": "fp32", "scales": "*fp16", "minimums": "*fp16"} | ({} if bits == 16 else {"weight": "*i16"})
    variants = []
    gpu = Gpu(132, SHARED_BYTES.get(capability, LOCAL_BYTES), capability)
    for count, outputs in ((1, 4096), (64, 4096), (136, 4096), (72, 128_256), (136, 128_256), (256, 128_256)):
        splits = splits_of(4096, outputs)
        tile = Tile.of(count, outputs, splits, gpu, bits, is_plain=levels < 0 and epilogue == 0)
        sizes = {"block_rows": tile.rows, "more_rows": tile.more_rows, "block_outputs": tile.outputs}
        sizes |= {
            "inputs": 4096,
            "bits": bits,
            "block_inputs": tile.inputs,
            "splits": splits,
            "split_inputs": 4096 // splits,
            "has_bias": levels < 0,
            "levels": levels,
            "epilogue": epilogue,
            "pdl": capability >= 90,
            "ahead": AHEAD if capability >= 90 else 0,
        }
        stages = tile.stages(gpu.shared_bytes, tile.block_bytes(bits))
        variants.append(Variant(capability, "product_kernels", "multiply", kinds, sizes, tile.warps, stages))
    return variants


def experts(capability: int, dtype: torch.dtype, bits: int = 16) -> list[Variant]:
    """The kernels of a mixture of 128 experts of which a row chooses 8, for one row, few and many."""
    kinds = dict.fromkeys(("rows", "bias", "out", "shares", "logits"), f"*{TYPES[dtype]}")
    kinds |= {"partial": "*fp32", "scales": "*fp16", "minimums": "*fp16", "index": "*i64"}
    kinds |= dict.fromkeys(("order", "work", "arrived"), "*i32")
    kinds |= {"weight": f"*{TYPES[dtype]}" if bits == 16 else "*i8" if bits == 8 else "*u8"}
    hidden, width, count, chosen = 2048, 768, 128, 8
    gpu, mixture = Gpu(132, SHARED_BYTES[capability] - 1024, capability), {"experts": count, "chosen": chosen}
    scores = {"is_sigmoid": False, "has_bias": False, "is_normed": True, "epsilon": 0.0, "scale": 1.0}
    padded = {"padded_experts": 128, "padded_chosen": 8}
    variants = [Variant(capability, "expert_kernels", "choose", {**kinds, "bias": "*fp32"}, {**mixture, **scores, **padded}, 1)]
    for rows in (1, 16, 2048):
        tile = work_of(rows, chosen, count).tile
        sizes = Tile(tile, 0, EXPERT_OUTPUTS, INPUTS, 4)
        common = {**mixture, "bits": bits, "has_bias": False, "is_single": rows == 1, "tile": tile}
        common |= {"block_outputs": EXPERT_OUTPUTS, "block_inputs": INPUTS}
        up = {"inputs": hidden, "in_turns": False, "how": 0, "alpha": 1.0, "limit": 0.0}
        down = {"inputs": width, "splits": 1, "split_inputs": width, "added_rows": min(rows, ADDED_ROWS)}
        stages = stages_of(sizes, gpu, bits)
        listed = {"experts": count, "padded_experts": 256, "tile": tile}
        variants += [
            Variant(capability, "expert_kernels", "gate_up", kinds, {**common, **up}, 4, stages),
            Variant(capability, "expert_kernels", "down", kinds, {**common, **down}, 4, stages),
            Variant(capability, "expert_kernels", "list_work", kinds, listed),
        ]
    return variants


def recurrence(capability: int, key_dim: int, value_dim: int, is_delta: bool) -> list[Variant]:
    """The kernels of recurrent layers."""
    kinds: dict[str, str] = {name: "*i64" for name in ("rows", "streams")}
    kinds |= dict.fromkeys(("queries", "keys", "values", "decays", "beta", "taps", "out"), "*fp32")
    kinds |= dict.fromkeys(("inputs", "bias"), "*bf16")
    sizes = {"size": ROWS, "most_rows": 129, "key_dim": key_dim, "value_dim": value_dim, "block_values": 32}
    scan = {"is_delta": is_delta, "padded_rows": ROWS, "block_keys": 32, "block_rows": 16}
    channels = {"size": ROWS, "most_rows": 129, "window": 3, "channels": 8192, "block": 256}
    constants: dict[str, dict[str, Any]] = {
        "scan": {**scan, **sizes},
        "fold": {"padded_key": key_dim, **sizes},
        "convolve": {"has_bias": True, "words": 3, **channels},
        "shift": {"itemsize": 2, **channels},
    }
    return [Variant(capability, "recurrent_kernels", name, kinds, each) for name, each in constants.items()]


def likeliest(capability: int, dtype: torch.dtype) -> list[Variant]:
    """The kernels that find the likeliest tokens."""
    kinds = {"logits": f"*{TYPES[dtype]}"} | dict.fromkeys(("values", "masses", "probabilities"), "*fp32")
    kinds |= dict.fromkeys(("ids", "chosen"), "*i32")
    sizes = {"count": 8, "most": 8, "low_bits": LOW_BITS[dtype]}
    return [
        Variant(capability, "ranking_kernels", "likeliest_of_block", kinds, {**sizes, "block": BLOCK}, CHOICE_WARPS),
        Variant(capability, "ranking_kernels", "likeliest", kinds, {**sizes, "most_blocks": 32}),
    ]


def sampling(capability: int, dtype: torch.dtype, draws: int = 1) -> list[Variant]:
    """The kernels that choose tokens."""
    kinds = dict.fromkeys(("logits", "kept"), f"*{TYPES[dtype]}") | dict.fromkeys(("values", "probabilities"), "*fp32")
    kinds |= dict.fromkeys(("ids", "chosen"), "*i32") | dict.fromkeys(("settings", "masses"), "*i64")
    sizes = {"draws": draws, "most": 1, "most_blocks": 32}
    slots = {"low_bits": LOW_BITS[dtype], "slots": SLOTS}
    return [
        Variant(capability, "sampling_kernels", "weigh", kinds, {**sizes, "block": BLOCK}, WARPS),
        Variant(capability, "sampling_kernels", "keep", kinds, {**sizes, **slots, "block": BLOCK}, CHOICE_WARPS),
        Variant(capability, "sampling_kernels", "choose", kinds, {**sizes, **slots, "block": CHOICE_BLOCK}, CHOICE_WARPS),
    ]


BFLOAT16, FLOAT16, FLOAT32 = TYPES
# The bytes that kernels may spill, and the kernels. Heads of 256 in float32 need more shared memory than most GPUs have.
CASES: dict[str, tuple[int, Callable[[int], list[Variant]]]] = {
    "attention": (NUMBER_BYTES, partial(attention, dtype=BFLOAT16, head_dim=128)),
    "attention in float16": (NUMBER_BYTES, partial(attention, dtype=FLOAT16, head_dim=128)),
    "attention in float32": (FEW_BYTES, partial(attention, dtype=FLOAT32, head_dim=128)),
    "attention to int8": (FEW_BYTES, partial(attention, dtype=BFLOAT16, head_dim=128, cache="int8")),
    "attention to fp8": (FEW_BYTES, partial(attention, dtype=BFLOAT16, head_dim=128, cache="fp8")),
    "heads of 64 with a window": (FEW_BYTES, partial(attention, dtype=BFLOAT16, head_dim=64, window=32)),
    "heads of 256 with a window": (FEW_BYTES, partial(attention, dtype=BFLOAT16, head_dim=256, window=32)),
    **{f"products of {bits} bits": (NUMBER_BYTES, partial(products, dtype=BFLOAT16, bits=bits)) for bits in (16, 8, 4)},
    **{
        f"gates of {bits} bits": (FEW_BYTES, partial(products, dtype=BFLOAT16, bits=bits, levels=6, epilogue=1))
        for bits in (16, 4)
    },
    **{f"residuals of {bits} bits": (FEW_BYTES, partial(products, dtype=BFLOAT16, bits=bits, epilogue=2)) for bits in (16, 4)},
    **{f"experts of {bits} bits": (NUMBER_BYTES, partial(experts, dtype=BFLOAT16, bits=bits)) for bits in (16, 8, 4)},
    "delta rule": (256, partial(recurrence, key_dim=128, value_dim=128, is_delta=True)),
    "Mamba": (256, partial(recurrence, key_dim=256, value_dim=64, is_delta=False)),
    **{f"the likeliest in {name}": (FEW_BYTES, partial(likeliest, dtype=dtype)) for dtype, name in TYPES.items()},
    **{f"a sample in {name}": (FEW_BYTES, partial(sampling, dtype=dtype)) for dtype, name in TYPES.items()},
    "samples": (FEW_BYTES, partial(sampling, dtype=BFLOAT16, draws=8)),
}


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_launch_and_spill_little(case: str, capability: int) -> None:
    stack_bytes, variants = CASES[case][0], CASES[case][1](capability)
    for variant, usage in zip(variants, usages(variants), strict=True):
        assert usage.shared_bytes <= SHARED_BYTES[capability] and usage.stack_bytes <= stack_bytes, (variant, usage)
        assert usage.tensor_core_instructions > 0 or variant.kernel not in (
            "attend_text",
            "multiply",
            "scan",
            "gate_up",
            "down",
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kernels_compile_for_amd(dtype: torch.dtype) -> None:
    """In float32 only for heads of 64: those of 128 need more local memory than a program may have."""
    variants = [*attention(GFX942, dtype, 128 if dtype == torch.bfloat16 else 64), *recurrence(GFX942, 128, 128, True)]
    found = dict(zip((each.kernel for each in variants), usages(variants), strict=True))
    assert found["attend_text"].tensor_core_instructions > 0 and found["scan"].tensor_core_instructions > 0
    assert all(usage.shared_bytes <= LOCAL_BYTES for usage in found.values())
    usages([*sampling(GFX942, dtype), *likeliest(GFX942, dtype)])
    if dtype == torch.bfloat16:
        usages([replace(each, stages=2) for each in products(GFX942, dtype)])
