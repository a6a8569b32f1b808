"""What compiled kernels use on each generation of GPUs: hardly anything is spilled in bfloat16, and each launch fits.

A spilled register costs a trip to memory for each block of keys, and a kernel with too much shared memory does not launch.
"""

import pytest

from tests.verify.model.gpu.compiled.compiling import CASES, GFX942, LOCAL_BYTES, SHARED_BYTES, usages

pytestmark = pytest.mark.slow
# Bytes of a thread that kernels may spill: a number outside loops; more in float32, with keys of 8 bits, windows, or filters.
NUMBER_BYTES, FEW_BYTES = 8, 24
SPILLED = {
    **dict.fromkeys(("attention", "attention in float16"), NUMBER_BYTES),
    **{f"{kind} of {bits} bits": NUMBER_BYTES for kind in ("products", "experts") for bits in (16, 8, 4)},
    **dict.fromkeys(("delta rule", "Mamba"), 256),
}
# Kernels that begin while the one before still runs.
OVERLAPPING = ("attend_text", "attend_own", "write", "multiply")
WITH_PRODUCTS = ("attend_text", "multiply", "scan", "gate_up", "down")
# Heads of 256 in float32 need more shared memory than most GPUs have; on AMD's, so do those of 128.
ON_AMD = ("attention", "attention of 64 in float32", "delta rule", "a sample", "a sample in float32", "products of 16 bits")


@pytest.mark.parametrize("capability", SHARED_BYTES)
@pytest.mark.parametrize("case", CASES)
def test_kernels_launch_and_spill_little(case: str, capability: int) -> None:
    for usage in usages(case, capability):
        assert usage.shared_bytes <= SHARED_BYTES[capability], usage
        assert usage.stack_bytes <= SPILLED.get(case, FEW_BYTES), usage
        assert usage.tensor_core_instructions > 0 or usage.kernel not in WITH_PRODUCTS, usage
        assert usage.waits_first or capability < 90 or usage.kernel not in OVERLAPPING, usage


@pytest.mark.parametrize("case", ON_AMD)
def test_kernels_compile_for_amd(case: str) -> None:
    for usage in usages(case, GFX942):
        assert usage.shared_bytes <= LOCAL_BYTES, usage
        assert usage.tensor_core_instructions > 0 or usage.kernel not in WITH_PRODUCTS, usage
