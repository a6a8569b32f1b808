"""Writes random weights in the formats of quantised checkpoints, from their public descriptions, and says what they mean."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.verify.model.cpu.native.weights import Kind

GROUP = 32
LINEAR = re.compile(r"(_proj)\.weight$")
PLACES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # e2m1
Parts: TypeAlias = dict[str, torch.Tensor]
# Writes [outputs, inputs]: the tensors by the ends of their names, and the weights.
Writer: TypeAlias = Callable[[Any, int, int], tuple[Parts, torch.Tensor]]


@dataclass(frozen=True)
class Form:
    """A format: its part of the configuration, and as what its weights are packed."""

    name: str
    config: dict[str, Any]
    kind: Kind
    write: Writer

    def __str__(self) -> str:
        return self.name


def words(values: Any, bits: int) -> NDArray[np.int32]:
    """Packs integers of `bits` bits, [rows, count], into 32-bit words, lowest first."""
    digits = np.unpackbits(values.astype(np.uint8)[..., None], axis=2, bitorder="little")[..., :bits].reshape(len(values), -1)
    digits = np.pad(digits, ((0, 0), (0, -digits.shape[1] % 32)))
    return np.packbits(digits, axis=1, bitorder="little").view(np.int32)


def integers(
    generator: Any, outputs: int, inputs: int, bits: int, symmetric: bool, least: int, groups: int, dtype: torch.dtype
) -> tuple[Any, Any, torch.Tensor]:
    values = generator.integers(0, 1 << bits, (outputs, inputs))
    zeros = generator.integers(least, 1 << bits, (outputs, groups))
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    scales = torch.from_numpy(generator.uniform(0.5, 1.5, (outputs, groups)) * 0.3 / (1 << bits)).to(dtype)
    return values, zeros, scales


def meant(values: Any, zeros: Any, scales: torch.Tensor, order: Any = None) -> torch.Tensor:
    groups = np.arange(values.shape[1]) * zeros.shape[1] // values.shape[1] if order is None else order
    return torch.from_numpy((values - zeros[:, groups]).astype(np.float32)) * scales.float()[:, groups]


def tensors(**parts: Any) -> Parts:
    return {
        f".{name}": (each if isinstance(each, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(each))).contiguous()
        for name, each in parts.items()
    }


def gptq(bits: int, symmetric: bool = False, less: int = 1, in_order: bool = True) -> Writer:
    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        least = max(less, bits == 8)
        values, zeros, scales = integers(generator, outputs, inputs, bits, symmetric, least, inputs // GROUP, torch.float16)
        order = np.arange(inputs) // GROUP
        if not in_order:
            generator.shuffle(order)
        parts = {"qweight": words(values, bits).T, "qzeros": words(zeros.T - less, bits), "scales": scales.T}
        return tensors(**parts, g_idx=order.astype(np.int32)), meant(values, zeros, scales, order)

    return write


def awq(is_gemv: bool) -> Writer:
    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        values, zeros, scales = integers(generator, outputs, inputs, 4, False, 0, inputs // GROUP, torch.float16)
        if is_gemv:
            width = -(-zeros.shape[1] // 32) * 32  # groups of 32 inputs are padded to four words
            padded = np.pad(zeros, ((0, 0), (0, width - zeros.shape[1])))
            held = torch.nn.functional.pad(scales, (0, width - scales.shape[1]))
            return tensors(qweight=words(values, 4), qzeros=words(padded, 4), scales=held), meant(values, zeros, scales)
        turns = [0, 2, 4, 6, 1, 3, 5, 7]
        packed = [words(each.T.reshape(-1, outputs // 8, 8)[..., turns].reshape(-1, outputs), 4) for each in (values, zeros)]
        return tensors(qweight=packed[0], qzeros=packed[1], scales=scales.T), meant(values, zeros, scales)

    return write


def compressed(bits: int, symmetric: bool = False, dtype: torch.dtype = torch.float16, per_channel: bool = False) -> Writer:
    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        groups = 1 if per_channel else inputs // GROUP
        values, zeros, scales = integers(generator, outputs, inputs, bits, symmetric, bits == 8, groups, dtype)
        scales = scales / 4096 if dtype == torch.bfloat16 else scales  # smaller than float16's
        parts = {"weight_packed": words(values, bits), "weight_scale": scales, "weight_shape": np.array([outputs, inputs])}
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T, bits).T
        return tensors(**parts), meant(values, zeros, scales)

    return write


def bytes_of(symmetric: bool, end: str = "weight_scale") -> Writer:
    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        values, zeros, scales = integers(generator, outputs, inputs, 8, symmetric, 1, 1, torch.float32)
        parts = {"weight": (values - 128).astype(np.int8), end: scales * 127 if end == "SCB" else scales}
        if end == "SCB":
            scales, parts[end] = scales * 127 / 127, parts[end].reshape(-1)
        if not symmetric:
            parts["weight_zero_point"] = (zeros - 128).astype(np.int8)
        return tensors(**parts), meant(values, zeros, scales)

    return write


def float8(rows: int, columns: int, end: str = "weight_scale", exponents: bool = False) -> Writer:
    """float8 with one scale for each block of `rows` by `columns` values; 0 = all of them."""

    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        values = torch.from_numpy(generator.normal(size=(outputs, inputs)) * 30).float().to(torch.float8_e4m3fn)
        height, width = rows or outputs, columns or inputs
        shape = (-(-outputs // height), -(-inputs // width))
        scales = torch.from_numpy(generator.uniform(0.5, 1.5, shape) / 300).float()
        held = scales
        if exponents:
            held = torch.from_numpy(generator.integers(115, 119, shape).astype(np.uint8))
            scales = torch.exp2(held.float() - 127)
        whole = scales.repeat_interleave(height, 0)[:outputs].repeat_interleave(width, 1)[:, :inputs]
        return tensors(weight=values, **{end: held[0, 0] if held.numel() == 1 else held}), values.float() * whole

    return write


def fp4(generator: Any, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    places = torch.from_numpy(generator.integers(0, 16, (outputs, inputs)))
    return PLACES[places], (places[:, ::2] | places[:, 1::2] << 4).to(torch.uint8)


def nvfp4(is_compressed: bool) -> Writer:
    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        values, pairs = fp4(generator, outputs, inputs)
        scales = torch.from_numpy(generator.uniform(0, 400, (outputs, inputs // 16))).float().to(torch.float8_e4m3fn)
        scale = torch.tensor([3.3e-5])
        weights = values * scales.float().repeat_interleave(16, 1) * scale
        if is_compressed:
            return tensors(weight_packed=pairs, weight_scale=scales, weight_global_scale=1 / scale), weights
        held = {"weight": pairs, "weight_scale": scales, "weight_scale_2": scale[0], "input_scale": torch.ones(())}
        return tensors(**held, k_scale=torch.ones(())), weights

    return write


def mxfp4(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
    values, pairs = fp4(generator, outputs, inputs)
    scales = torch.from_numpy(generator.integers(118, 124, (outputs, inputs // 32)).astype(np.uint8))
    return tensors(weight_packed=pairs, weight_scale=scales), values * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)


def four_bits(is_nested: bool) -> Writer:
    """bitsandbytes' NF4, with any table."""

    def write(generator: Any, outputs: int, inputs: int) -> tuple[Parts, torch.Tensor]:
        table = torch.from_numpy(np.sort(generator.uniform(-1, 1, 16))).float()
        places = torch.from_numpy(generator.integers(0, 16, outputs * inputs))
        held = {"weight": (places[::2] << 4 | places[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        largest = torch.from_numpy(generator.uniform(0.05, 0.2, len(places) // 64)).float()
        held["weight.absmax"] = largest
        if is_nested:
            numbers = torch.from_numpy(generator.integers(0, 256, len(largest)))
            inner = torch.from_numpy(generator.uniform(0.5, 1, -(-len(largest) // 256))).float()
            names = torch.from_numpy(np.sort(generator.uniform(-0.1, 0.1, 256))).float()
            held |= {"weight.absmax": numbers.to(torch.uint8), "weight.nested_absmax": inner, "weight.nested_quant_map": names}
            state |= {"nested_blocksize": 256, "nested_offset": 0.15}
            largest = names[numbers] * inner.repeat_interleave(256)[: len(numbers)] + 0.15
        held["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        weights = table[places] * largest.repeat_interleave(64)
        return tensors(**held), weights.reshape(outputs, inputs)

    return write


def form(name: str, kind: Kind, write: Writer, method: str = "compressed-tensors", **config: Any) -> Form:
    return Form(name, {"quant_method": method, **config}, kind, write)


SQUARES = {"weight_block_size": [32, 32]}
FORMS = [
    form("GPTQ", Kind.ZERO4, gptq(4), "gptq"),
    form("GPTQ, symmetric", Kind.Q4_0, gptq(4, symmetric=True), "gptq"),
    form("GPTQ, version 2", Kind.ZERO4, gptq(4, less=0), "gptq", checkpoint_format="gptq_v2"),
    form("GPTQ, in another order", Kind.BFLOAT16, gptq(4, in_order=False), "gptq"),
    *(
        form(f"GPTQ, {bits} bits", Kind.ZERO4 if bits < 4 else Kind.ZERO8, gptq(bits, symmetric=bits == 2), "gptq")
        for bits in (2, 3, 8)
    ),
    form("GPTQ, 8 bits, symmetric", Kind.INT8, gptq(8, symmetric=True), "gptq"),
    form("AutoRound as GPTQ", Kind.ZERO4, gptq(4), "auto-round", packing_format="auto_round:auto_gptq"),
    form("AutoRound", Kind.ZERO4, gptq(4, less=0), "auto-round", packing_format="auto_round"),
    form("AutoRound as AWQ", Kind.ZERO4, awq(False), "auto-round", packing_format="auto_round:auto_awq"),
    form("AWQ", Kind.ZERO4, awq(False), "awq"),
    form("AWQ for vectors", Kind.ZERO4, awq(True), "awq", version="gemv", group_size=GROUP),
    form("packed", Kind.ZERO4, compressed(4), format="pack-quantized"),
    form("packed, symmetric", Kind.Q4_0, compressed(4, symmetric=True)),
    form("packed, bfloat16", Kind.ZERO4, compressed(4, dtype=torch.bfloat16)),
    form("packed, channels", Kind.Q4_0, compressed(4, symmetric=True, dtype=torch.float32, per_channel=True)),
    *(form(f"packed, {bits} bits", Kind.ZERO8, compressed(bits)) for bits in (5, 8)),
    form("integers", Kind.INT8, bytes_of(True), format="int-quantized"),
    form("integers with zeros", Kind.ZERO8, bytes_of(False)),
    form("bitsandbytes, 8 bits", Kind.INT8, bytes_of(True, "SCB"), "bitsandbytes", load_in_8bit=True),
    form("bitsandbytes, 4 bits", Kind.BFLOAT16, four_bits(False), "bitsandbytes", load_in_4bit=True),
    form("bitsandbytes, nested", Kind.BFLOAT16, four_bits(True), "bitsandbytes", load_in_4bit=True),
    form("float8, tensors", Kind.BFLOAT16, float8(0, 0), format="float-quantized"),
    form("float8, channels", Kind.BFLOAT16, float8(1, 0), "fbgemm_fp8"),
    form("float8, squares", Kind.BFLOAT16, float8(32, 32, "weight_scale_inv"), "fp8", **SQUARES),
    form("float8, groups", Kind.BFLOAT16, float8(1, 32, exponents=True), format="mxfp8-quantized"),
    form("NVFP4 of ModelOpt", Kind.NVFP4, nvfp4(False), "modelopt", quant_algo="NVFP4"),
    form("NVFP4", Kind.NVFP4, nvfp4(True), format="nvfp4-pack-quantized"),
    form("MXFP4", Kind.MXFP4, mxfp4, format="mxfp4-pack-quantized"),
]
ROUNDED = {"GPTQ, in another order", "bitsandbytes, 4 bits", "bitsandbytes, nested", "float8, squares", "float8, groups"}
BY_NAME = {each.name: each for each in FORMS}


def save(folder: Path, model: Any, forms: Sequence[Form | None], plain: bool = False, seed: int = 0) -> Path:
    """A checkpoint of the model, whose linear layers take turns among formats; None = not quantised.

    With `plain`, it has the weights that they mean.
    """
    model.save_pretrained(folder)
    found = load_file(folder / "model.safetensors")
    for number, name in enumerate([each for each in found if LINEAR.search(each)]):
        used = forms[number % len(forms)]
        if used is None:
            continue
        parts, weights = used.write(np.random.default_rng(seed + number), *found.pop(name).shape)
        stem = name.removesuffix(".weight")
        found |= {name: weights.contiguous()} if plain else {stem + end: each for end, each in parts.items()}
    save_file(found, folder / "model.safetensors")
    if not plain:
        config = json.loads((folder / "config.json").read_text())
        settings = next(each.config for each in forms if each is not None)
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder
