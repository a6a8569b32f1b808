"""LLVM of the installed version compiles the code of every kernel, also for CPUs that this machine does not have."""

from __future__ import annotations

import platform

import pytest
from llvmlite import binding

from outrider.verify.model.cpu import llvm
from outrider.verify.model.cpu.libtorch import OPERATOR
from outrider.verify.model.cpu.panel_kernel import Arithmetic, Kernel
from outrider.verify.model.cpu.panels import AMX, AVX2, AVX512
from outrider.verify.model.cpu.tile_kernel import TileKernel

KERNELS = [
    (Kernel(Arithmetic.FLOAT32, *AVX2), "haswell"),
    (Kernel(Arithmetic.WIDENED, *AVX2), "haswell"),
    (Kernel(Arithmetic.FLOAT32, *AVX512), "skylake-avx512"),
    (Kernel(Arithmetic.WIDENED, *AVX512), "skylake-avx512"),
    (Kernel(Arithmetic.PAIRS, *AVX512), "znver4"),
    (TileKernel(Arithmetic.TILES, *AMX), "sapphirerapids"),
]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the CPUs are x86")
@pytest.mark.parametrize(("kernel", "cpu"), KERNELS)
def test_the_code_of_every_kernel_compiles(kernel: Kernel, cpu: str) -> None:
    machine = llvm.machine(cpu, "")
    version = ".".join(map(str, binding.llvm_version_info))
    try:
        module = binding.parse_assembly(OPERATOR.format(width=kernel.width) + kernel.source())
        assert machine.emit_object(module)
    except RuntimeError as error:
        pytest.fail(f"LLVM {version} does not accept the code of {kernel}: {error}; llvm.py says what to use instead.")


def test_code_that_is_not_valid_raises_an_error() -> None:
    with pytest.raises(RuntimeError, match="expected"):
        llvm.compiled("define nothing", {}, "operator")


def test_the_cpu_has_a_name_and_features() -> None:
    name, features = llvm.processor()
    assert name and features
    assert not llvm.has("no such feature")
