"""`python -m tests.verify.model.gpu.compiled.figures`: what kernels use on each generation of GPUs, for docs/roofline.md.

They are compiled, which needs no GPU; nothing is measured.
"""

from collections.abc import Iterator
from typing import Any

from bench import report
from bench.roofline import COMPILED
from tests.verify.model.gpu.compiled.compiling import SHARED_BYTES, usages

# By name: the case that launches a kernel, the kernel, and the number of its launch among the case's.
KERNELS = {
    "product, 16 bits, 1 row": ("products of 16 bits", "multiply", 0),
    "64 rows": ("products of 16 bits", "multiply", 1),
    "with gates": ("gates of 16 bits", "multiply", 0),
    "with residual": ("residuals of 16 bits", "multiply", 0),
    "product, 8 bits, 1 row": ("products of 8 bits", "multiply", 0),
    "product, 4 bits, 1 row": ("products of 4 bits", "multiply", 0),
    "4 bits, 64 rows": ("products of 4 bits", "multiply", 1),
    "product, Q4_K, 1 row": ("products of Q4_K", "multiply", 0),
    "experts, gate and up, 4 bits": ("experts of 4 bits", "gate_up", 0),
    "experts, down, 4 bits": ("experts of 4 bits", "down", 0),
    "rotation and cache write": ("attention", "write", 1),
    "attention, text": ("attention", "attend_text", 0),
    "attention, own block": ("attention", "attend_own", 0),
    "recurrent scan, delta rule": ("delta rule", "scan", 0),
    "choice of a token": ("a sample", "choose", 0),
}


def figures() -> Iterator[dict[str, Any]]:
    """A row for each kernel and compute capability."""
    for case in dict.fromkeys(case for case, *_ in KERNELS.values()):
        for capability in SHARED_BYTES:
            found = usages(case, capability)
            for name, (of, kernel, number) in KERNELS.items():
                if of == case:
                    use = [each for each in found if each.kernel == kernel][number]
                    sizes = {"registers": use.registers, "spilled_bytes": use.stack_bytes, "barriers": use.barriers}
                    per_weight = {"instructions_per_weight": use.instructions_per_weight}
                    yield {"kernel": name, "capability": capability, **sizes, **per_weight}


if __name__ == "__main__":
    report.save(COMPILED, {"kernels": list(figures())})
