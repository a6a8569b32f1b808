"""What compiled kernels use on each generation of GPUs: hardly anything is spilled in bfloat16, and each launch fits.

Kernels that are compiled at the same time are those that later launches find.

A spilled register costs a trip to memory for each block of keys, and a kernel with too much shared memory does not launch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verify.model.gpu.compiled.compiling import CASES, GFX942, LOCAL_BYTES, SHARED_BYTES, usages

pytestmark = pytest.mark.slow
# The kernels that may spill some bytes of a thread: those in float32, with 8-bit keys, windows, or for several GPUs.
FEW_BYTES, SPILLED = 24, ("float32", "attention to", "heads of", "ranks of")
# Kernels that begin while the one before still runs.
OVERLAPPING = ("attend_text", "attend_own", "write", "multiply", "embed", "add_parts", "await_ranks")
WITH_PRODUCTS = ("attend_text", "multiply", "scan", "gate_up", "down")
# Heads of 256 in float32 need more shared memory than most GPUs have; on AMD's, so do those of 128.
ON_AMD = ("attention", "attention of 64 in float32", "delta rule", "a sample", "a sample in float32", "products of 16 bits")


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_launch_and_spill_little(case: str, capability: int) -> None:
    for usage in usages(case, capability):
        assert usage.shared_bytes <= SHARED_BYTES[capability], usage
        assert usage.stack_bytes <= (FEW_BYTES if any(name in case for name in SPILLED) else 0), usage
        assert usage.tensor_core_instructions > 0 or usage.kernel not in WITH_PRODUCTS, usage
        assert usage.awaits_ranks or usage.kernel != "add_parts", usage
        assert usage.waits_first or capability < 90 or usage.kernel not in OVERLAPPING, usage


@pytest.mark.parametrize("case", ON_AMD)
def test_kernels_compile_for_amd(case: str) -> None:
    for usage in usages(case, GFX942):
        assert usage.shared_bytes <= LOCAL_BYTES, usage
        assert usage.tensor_core_instructions > 0 or usage.kernel not in WITH_PRODUCTS, usage


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
from concurrent.futures import CancelledError
from threading import Event, Thread

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
stopped, apart = Event(), []
stopped.set()


def launch():
    try:
        add[(1,)](rows, rows, size=16)
    except AttributeError as error:  # of the driver
        apart.append(str(error))


try:
    with compiled_together(stopped):
        add[(1,)](rows, rows, size=128)
except CancelledError:
    launched[128] = None
with compiled_together():
    thread = Thread(target=launch)
    thread.start()
    thread.join()
found = {size: add.warmup(rows, rows, size=size, grid=(1,)) for size in launched}
try:
    wrong[(1,)](rows, size=16)
except Exception as error:
    print(json.dumps([["cubin" in each.asm for each in found.values()], len(apart), type(error).__name__]))
"""


def test_kernels_are_compiled_and_not_launched(tmp_path: Path) -> None:
    """Also one that was stopped. In another process, whose driver knows a GPU that is not there: a launch would fail."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[True] * 4, 1, "CompilationError"]
