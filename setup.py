"""Maps folders to packages of `outrider`, and compiles the libraries of `outrider.verify.model.cpu.native`,
`outrider.drafters.native` and `outrider.verify.gguf.native`.

The first is compiled once for each kind of CPU; for an editable install or one in place, which stay on their machine, only for
the kinds that the machine can run. ctypes loads the libraries, so one wheel serves all versions of Python. release/wheels.py
compiles for other machines. All else is in pyproject.toml.
"""

import copy
import glob
import os
import runpy
import sysconfig

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CompileError, LinkError

FOLDERS = ("server", "drafters", "verify", "models")
FOLDER, DRAFTERS, VOCABULARIES = "verify/model/cpu/native", "drafters/native", "verify/gguf/native"
# Instructions by variant, as `outrider.verify.model.cpu.native.variants.VARIANTS` chooses among them.
X86 = {
    "amx": ["-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8"],
    "avx512": ["-march=x86-64-v4", "-mavx512vnni"],
    "avxvnni": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
ARM = {"i8mm": ["-march=armv8.2-a+dotprod+i8mm"], "dotprod": ["-march=armv8.2-a+dotprod"]}
MACHINE = sysconfig.get_platform().rpartition("-")[2]
VARIANTS = {"portable": []} | {"x86_64": X86, "amd64": X86, "aarch64": ARM}.get(MACHINE, {})
# Products are never contracted to sums of one rounding: each variant must compute the same bits.
ARGUMENTS = [
    "-O3",
    "-g0",
    "-std=c++20",
    "-ffp-contract=off",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-maybe-uninitialized",
]
MISSING = (
    "Outrider's libraries could not be compiled: install g++ 11 or newer (`apt install g++`, `dnf install gcc-c++`),"
    " or a wheel of Outrider, which needs no compiler."
)
ON_WINDOWS = os.name == "nt"  # where the libraries have not been compiled yet, and the server starts without them


class BuildVariants(build_ext):
    def run(self) -> None:
        self.stays = self.editable_mode or self.inplace  # on this machine; the latter is reset while it builds
        super().run()

    def build_extensions(self) -> None:
        if self.stays:
            variants = runpy.run_path(f"{FOLDER}/variants.py")
            flags = variants["processor_flags"]()
            others = {f"_{variant}" for variant, needed in variants["VARIANTS"].items() if not needed <= flags}
            self.extensions = [each for each in self.extensions if each.name.rpartition(".")[2] not in others]
        super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Compiles a variant in a folder of its own: all have the same sources, and several are compiled at a time."""
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name.rpartition(".")[2])
        try:
            super(BuildVariants, own).build_extension(ext)
        except (CompileError, LinkError) as error:
            if not ext.optional:
                raise BaseError(f"{MISSING} ({error})") from None
            raise

    def get_ext_filename(self, fullname: str) -> str:
        """The file of a library, without the version of Python."""
        return os.path.join(*fullname.split(".")) + os.path.splitext(super().get_ext_filename(fullname))[1]


class AnyPython(bdist_wheel):
    """A wheel for one kind of machine and all versions of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildVariants, "bdist_wheel": AnyPython},
    options={"build_ext": {"parallel": os.cpu_count()}},
    package_dir={f"outrider.{folder}": folder for folder in FOLDERS},
    packages=[f"outrider.{name}" for folder in FOLDERS for name in find_packages(include=[folder, f"{folder}.*"])],
    ext_modules=[
        Extension(
            f"outrider.verify.model.cpu.native._{variant}",
            sources=[f"{FOLDER}/{name}.cpp" for name in ("forward", "sampling")],
            depends=glob.glob(f"{FOLDER}/*.h"),
            extra_compile_args=[*ARGUMENTS, *arguments],
            language="c++",
            optional=ON_WINDOWS,
        )
        for variant, arguments in VARIANTS.items()
    ]
    + [
        Extension(
            name,
            sources=sources,
            depends=glob.glob(f"{DRAFTERS}/*.h"),
            extra_compile_args=ARGUMENTS,
            language="c++",
            optional=ON_WINDOWS,
        )
        for name, sources in (
            ("outrider.drafters.native._drafters", [f"{DRAFTERS}/drafters.cpp"]),
            ("outrider.verify.gguf.native._pieces", [f"{VOCABULARIES}/pieces.cpp"]),
        )
    ],
)
