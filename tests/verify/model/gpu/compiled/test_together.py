"""Kernels that are compiled at the same time are those that later launches find."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = """
import triton
import triton.language as tl


@triton.jit
def add(left, right, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(left + at, tl.load(left + at) + tl.load(right + at))


@triton.jit
def wrong(left, size: tl.constexpr):
    tl.store(left + tl.arange(0, size), nothing)
"""
PROGRAM = """
import json

import torch
from kernels import add, wrong
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime import driver

from outrider.verify.model.gpu.compilation import compiled_together


class Gpu(CudaDriver):
    def __init__(self): pass
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0


driver.set_active(Gpu())
rows = torch.zeros(64)
with compiled_together():
    launched = {size: add[(1,)](rows, rows, size=size) for size in (16, 32, 64)}
    wrong[(1,)](rows, size=16)
found = {size: add.warmup(rows, rows, size=size, grid=(1,)) for size in launched}
try:
    wrong[(1,)](rows, size=16)
except Exception as error:
    print(json.dumps([["cubin" in each.asm for each in found.values()], type(error).__name__]))
"""


@pytest.mark.slow
def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    """In another process, whose driver knows a GPU that is not there: a launch would fail."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[True] * 3, "CompilationError"]
