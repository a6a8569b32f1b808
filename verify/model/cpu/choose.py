"""Replaces a model's linear layers by the fastest that this machine has.

Which ones those are is found out by timing them, once on a machine: the choice is stored with the machine's other findings.
"""

from __future__ import annotations

import time
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from outrider.verify.findings import choice_file, load_choice, save_choice
from outrider.verify.model.cpu import llvm
from outrider.verify.model.cpu.packing import PackedLinear
from outrider.verify.model.cpu.panel_kernel import Arithmetic
from outrider.verify.model.cpu.panels import PanelLinear, fits, kernel
from outrider.verify.model.packed import is_plain
from outrider.verify.model.private_torch import multiplies_bfloat16

ARITHMETIC = {torch.float32: (Arithmetic.FLOAT32,), torch.bfloat16: (Arithmetic.TILES, Arithmetic.PAIRS, Arithmetic.WIDENED)}
# The size of the layers that are timed, the rows of steps and of a prompt, and the repeats.
SIZE, ROWS, REPEATS = 1024, (1, 9, 33, 257), 5
# oneDNN must be faster by this factor, so that all starts on one machine are likely to decide alike.
MARGIN = 1.15
# The version of stored choices. It changes with the kernels.
VERSION = 1
# The name of oneDNN among the arithmetics, in stored choices.
ONEDNN = "oneDNN"


def can_pack(model: torch.nn.Module) -> bool:
    """Whether the model's linear layers can be replaced: on a CPU, in float32 and bfloat16."""
    weight = next(model.parameters())
    return weight.device.type == "cpu" and torch.backends.mkldnn.is_available() and weight.dtype in ARITHMETIC


def pack_layers(model: torch.nn.Module, findings: Path | None = None) -> None:
    """Replaces every plain linear layer of the model in place. `findings` as in `chosen`. Requires `can_pack`."""
    kernels: dict[torch.dtype, Arithmetic | None] = {}
    for name, module in list(model.named_modules()):
        if is_plain(module) and (dtype := module.weight.dtype) in ARITHMETIC:
            if dtype not in kernels:
                kernels[dtype] = chosen(dtype, findings)
            found = kernels[dtype]
            model.set_submodule(name, PanelLinear(module, found) if found and fits(module, found) else packed(module))


def chosen(dtype: torch.dtype, findings: Path | None) -> Arithmetic | None:
    """The arithmetic for layers of this dtype; None for oneDNN.

    It is read from the folder `findings`, or timed and saved there.
    """
    threads = torch.get_num_threads()
    versions = torch.__version__, version("llvmlite"), VERSION
    file = choice_file(findings, "linear", dtype, threads, *versions, llvm.processor(), SIZE, ROWS, REPEATS, MARGIN)
    stored = load_choice(file)
    if stored == ONEDNN:
        return None
    for each in ARITHMETIC[dtype]:
        if stored == each and kernel(each) is not None:
            return each
    found = fastest(dtype, threads)
    save_choice(found or ONEDNN, file)
    return found


def packed(linear: torch.nn.Linear) -> torch.nn.Module:
    """The layer with weights packed for oneDNN, or as it is if oneDNN does not multiply its dtype on this CPU."""
    is_possible = linear.weight.dtype != torch.bfloat16 or multiplies_bfloat16()
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
