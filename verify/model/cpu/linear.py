"""Replaces a model's linear layers by the fastest that this machine has."""

from __future__ import annotations

import time
from functools import cache

import torch

from outrider.verify.model.cpu.packing import PackedLinear, is_plain
from outrider.verify.model.cpu.panel_kernel import Arithmetic
from outrider.verify.model.cpu.panels import PanelLinear, fits

ARITHMETIC = {torch.float32: (Arithmetic.FLOAT32,), torch.bfloat16: (Arithmetic.TILES, Arithmetic.PAIRS, Arithmetic.WIDENED)}
SIZE, ROWS, REPEATS = 1024, (1, 9, 33, 257), 5  # of the layers that are timed, and rows of steps and of a prompt
MARGIN = 1.15  # by which oneDNN must be faster; then all starts on one machine decide alike


def can_pack(model: torch.nn.Module) -> bool:
    """Whether the model's linear layers can be replaced: on a CPU, in float32 and bfloat16."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and weight.dtype in ARITHMETIC


def pack_layers(model: torch.nn.Module) -> None:
    """Replaces every plain linear layer of the model in place. Requires `can_pack`."""
    for name, module in list(model.named_modules()):
        if is_plain(module) and (dtype := module.weight.dtype) in ARITHMETIC:
            chosen = fastest(dtype, torch.get_num_threads())
            model.set_submodule(name, PanelLinear(module, chosen) if chosen and fits(module, chosen) else packed(module))


def packed(linear: torch.nn.Linear) -> torch.nn.Module:
    """The layer with weights packed for oneDNN, or as it is if oneDNN does not multiply its dtype on this CPU."""
    is_possible = linear.weight.dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return PackedLinear(linear) if is_possible else linear


@cache
def fastest(dtype: torch.dtype, threads: int) -> Arithmetic | None:
    """Measures which arithmetic multiplies rows of steps and of prompts fastest; returns None if oneDNN does."""
    with torch.inference_mode():
        linear = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
        layers: dict[Arithmetic | None, torch.nn.Module] = {None: packed(linear)}
        layers |= {arithmetic: PanelLinear(linear, arithmetic) for arithmetic in ARITHMETIC[dtype] if fits(linear, arithmetic)}
        times = mean_times(list(layers.values()), dtype)
    times[0] *= MARGIN
    return list(layers)[times.index(min(times))]


def mean_times(layers: list[torch.nn.Module], dtype: torch.dtype) -> list[float]:
    """Seconds of each layer's product: the geometric mean over ROWS of the shortest of REPEATS, measured in turns."""
    means = [1.0] * len(layers)
    for count in ROWS:
        rows = torch.ones(1, count, SIZE, dtype=dtype)
        turns = [[seconds(layer, rows) for layer in layers] for _ in range(1 + REPEATS)]
        for index, times in enumerate(zip(*turns[1:], strict=True)):  # the first ones warm up
            means[index] *= min(times) ** (1 / len(ROWS))
    return means


def seconds(layer: torch.nn.Module, rows: torch.Tensor) -> float:
    """Seconds of the layer's product."""
    started = time.perf_counter()
    layer(rows)
    return time.perf_counter() - started
