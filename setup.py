"""Compiles the library of `outrider.verify.model.cpu.native`, once for each kind of CPU. All else is in pyproject.toml.

Without a C++ compiler, the package is installed without the library, and models run through PyTorch.
"""

import platform

from setuptools import Extension, setup

FOLDER = "verify/model/cpu/native"
# Instructions by variant, as `outrider.verify.model.cpu.native.library.VARIANTS` chooses among them.
X86 = {
    "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
VARIANTS = {"portable": []} | (X86 if platform.machine() in ("x86_64", "AMD64") else {})
# Products are never contracted to sums of one rounding: each variant must compute the same bits.
ARGUMENTS = ["-O3", "-std=c++20", "-ffp-contract=off", "-pthread"]

setup(
    ext_modules=[
        Extension(
            f"outrider.verify.model.cpu.native._{variant}",
            sources=[f"{FOLDER}/{name}.cpp" for name in ("forward", "sampling")],
            depends=[f"{FOLDER}/{name}.h" for name in ("attention", "matrix", "multiply", "stored", "team", "vector")],
            extra_compile_args=[*ARGUMENTS, *arguments],
            language="c++",
            optional=True,
        )
        for variant, arguments in VARIANTS.items()
    ]
)
