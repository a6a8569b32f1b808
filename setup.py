"""Maps folders to packages of `outrider`, and compiles the library of `outrider.verify.model.cpu.native`.

The library is compiled once for each kind of CPU. Without a C++ compiler, the package is installed without it, and models run
through PyTorch. All else is in pyproject.toml.
"""

import platform

from setuptools import Extension, find_packages, setup

FOLDERS = ("server", "drafters", "verify", "models")
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
    package_dir={f"outrider.{folder}": folder for folder in FOLDERS},
    packages=[f"outrider.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
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
    ],
)
