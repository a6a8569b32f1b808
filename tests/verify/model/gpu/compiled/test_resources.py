"""What compiled kernels use on each generation of GPUs: hardly anything is spilled in bfloat16, and each launch fits.

A spilled register costs a trip to memory for each block of keys, and a kernel with too much shared memory does not launch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.verify.model.gpu.triton_attention import SPLIT_KEYS, SPLITS_PER_SIZE, attend_blocks, split_count
from outrider.verify.model.gpu.triton_attention import WARPS as ATTEND_WARPS
from outrider.verify.model.gpu.triton_sampling import BLOCK, LOW_BITS, WARPS
from tests.verify.model.gpu.compiled.compiling import GFX942, LOCAL_BYTES, SHARED_BYTES, Usage, Variant, usages

pytestmark = pytest.mark.slow
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
CACHES = {"auto": None, "int8": "i8", "fp8": "u8"}
ROWS = 256
GROUPS = 4
# Bytes of a thread that kernels may spill which decode keys of 8 bits, have windows, or choose tokens.
FEW_BYTES = 16


def attention(capability: int, dtype: torch.dtype, head_dim: int, cache: str = "auto", window: int = 0) -> list[Variant]:
    """The kernels of tree attention of a model of GROUPS query heads for each key head, and 131,072 positions."""
    kind = TYPES[dtype]
    kinds = {name: "*i64" for name in ("rows", "streams", "tables")} | {"scaling": "fp32", "softcap": "fp32"}
    kinds |= dict.fromkeys(("query", "key", "value", "sinks"), f"*{kind}") | dict.fromkeys(("parts_out", "lse"), "*fp32")
    kinds |= {"pool": f"*{CACHES[cache] or kind}"}
    sizes = {"head_dim": head_dim, "padded_dim": head_dim, "size": ROWS}
    parts = 1 + split_count(131_072, SPLIT_KEYS)
    splits = {"block": 64, "split_keys": SPLIT_KEYS, "splits_per_size": SPLITS_PER_SIZE, "parts": parts}
    scores = {"groups": GROUPS, "padded_size": ROWS, "window": window, "capped": window > 0, "own_rows": 16}
    blocks = attend_blocks(head_dim, dtype)
    return [
        Variant(
            capability,
            "kernels",
            "attend",
            kinds | {"out": "*fp32"},
            {**scores, **sizes, **splits, "page_tokens": 256, "block_rows": blocks[0], "block_keys": blocks[1]},
            ATTEND_WARPS,
        ),
        Variant(capability, "kernels", "write", kinds, {**sizes, "page_tokens": 256}),
        Variant(
            capability,
            "kernels",
            "combine",
            kinds | {"out": f"*{kind}"},
            {**sizes, **splits, "has_sinks": window > 0, "block_parts": 64},
        ),
    ]


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


def sampling(capability: int, dtype: torch.dtype, has_filters: bool) -> Variant:
    """The kernel that chooses tokens."""
    kinds = {"logits": f"*{TYPES[dtype]}", "keys": "*i64", "chosen": "*i64", "top_p_bits": "i64"}
    kinds |= {"temperature": "fp32", "least_weight": "fp32"}
    constants = {"has_top_k": has_filters, "has_top_p": has_filters, "low_bits": LOW_BITS[dtype], "block": BLOCK}
    return Variant(capability, "sampling_kernels", "choose", kinds, constants, WARPS)


def checked(variants: list[Variant], stack_bytes: int = 0) -> dict[str, Usage]:
    """What each kernel uses, if it launches and spills no more than this."""
    found = dict(zip((each.kernel for each in variants), usages(variants), strict=True))
    for variant, usage in zip(variants, found.values(), strict=True):
        assert usage.shared_bytes <= SHARED_BYTES[variant.capability], variant
        assert usage.stack_bytes <= stack_bytes, (variant, usage)
    return found


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_attention_spills_nothing(capability: int, cache: str, dtype: torch.dtype) -> None:
    stack_bytes = 0 if cache == "auto" else FEW_BYTES
    assert checked(attention(capability, dtype, 128, cache), stack_bytes)["attend"].tensor_core_instructions > 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_heads_with_windows_spill_little(capability: int, head_dim: int) -> None:
    assert checked(attention(capability, torch.bfloat16, head_dim, window=32), FEW_BYTES)["attend"].tensor_core_instructions > 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_float32_launches_on_any_gpu(capability: int, head_dim: int) -> None:
    """Heads of 256 need more shared memory than most GPUs have, and are refused at the start there."""
    assert checked(attention(capability, torch.float32, head_dim))["attend"].tensor_core_instructions > 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize(("key_dim", "value_dim", "is_delta"), [(128, 128, True), (256, 64, False)])
def test_recurrent_layers_launch(capability: int, key_dim: int, value_dim: int, is_delta: bool) -> None:
    assert checked(recurrence(capability, key_dim, value_dim, is_delta), 256)["scan"].tensor_core_instructions > 0


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("dtype", TYPES, ids=TYPES.values())
def test_choosing_tokens_spills_little(capability: int, dtype: torch.dtype) -> None:
    for has_filters in (False, True):
        checked([sampling(capability, dtype, has_filters)], FEW_BYTES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_kernels_compile_for_amd(dtype: torch.dtype) -> None:
    """In float32 only for heads of 64: those of 128 need more local memory than a program may have."""
    variants = [*attention(GFX942, dtype, 128 if dtype == torch.bfloat16 else 64), *recurrence(GFX942, 128, 128, True)]
    found = dict(zip((each.kernel for each in variants), usages(variants), strict=True))
    assert found["attend"].tensor_core_instructions > 0 and found["scan"].tensor_core_instructions > 0
    assert all(usage.shared_bytes <= LOCAL_BYTES for usage in found.values())
    usages([sampling(GFX942, dtype, has_filters=True)])
