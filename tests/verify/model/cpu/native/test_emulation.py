"""Kernels for this CPU, and for others under user-mode emulation: they compute the bits of the portable form."""

import shutil
import subprocess
from pathlib import Path

import pytest

from outrider.verify.model.cpu.native.variants import AVX512, X86, processor_flags

SOURCE = Path(__file__).with_name("digest.cpp")
X86_COMPILER, ARM_COMPILER = "x86_64-linux-gnu-g++", "aarch64-linux-gnu-g++"
AVX512_OPTIONS = ("-march=x86-64-v4", "-mavx512vnni")
# By name: the compiler, its flags, and the emulator's command, or what this CPU must have.
MACHINES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...] | set[str]]] = {
    "Haswell": (X86_COMPILER, ("-mavx2", "-mfma", "-mf16c"), ("qemu-x86_64", "-cpu", "Haswell")),
    "Nehalem": (X86_COMPILER, (), ("qemu-x86_64", "-cpu", "Nehalem")),
    "ARM": (ARM_COMPILER, (), ("qemu-aarch64",)),
    "ARM with dot products": (ARM_COMPILER, ("-march=armv8.2-a+dotprod",), ("qemu-aarch64", "-cpu", "neoverse-n1")),
    "ARM with i8mm": (ARM_COMPILER, ("-march=armv8.2-a+dotprod+i8mm",), ("qemu-aarch64", "-cpu", "max")),
    "tile registers": ("g++", (*AVX512_OPTIONS, "-mamx-tile", "-mamx-int8"), X86["amx"]),
    "emulated tile registers": ("g++", (*AVX512_OPTIONS, "-DEMULATED_TILES"), AVX512),
    "AVX-512": ("g++", AVX512_OPTIONS, X86["avx512"]),
    "AVX VNNI": ("g++", ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"), X86["avxvnni"]),
}
SEEDS = ("1", "2")


def run(folder: Path, compiler: str, flags: tuple[str, ...], emulator: tuple[str, ...]) -> list[str]:
    """The lines that the compiled program prints. Skips if a command is missing."""
    for command in (compiler, *emulator[:1]):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")
    program = folder / "digest"
    arguments = ["-O2", "-std=c++20", "-ffp-contract=off", "-Wno-psabi", "-static", *flags, str(SOURCE), "-o", str(program)]
    subprocess.run([compiler, *arguments], check=True)
    found = subprocess.run([*emulator, str(program), *SEEDS], check=True, capture_output=True, text=True)
    return found.stdout.splitlines()


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the portable form prints on this machine."""
    found = run(tmp_path_factory.mktemp("portable"), "g++", (), ())
    assert len(set(found)) == len(found) > 0
    return found


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_a_cpu_computes_the_same_bits(machine: str, portable: list[str], tmp_path: Path) -> None:
    compiler, flags, needed = MACHINES[machine]
    if isinstance(needed, set) and not needed <= processor_flags():
        pytest.skip(f"this CPU has no {machine}")
    assert run(tmp_path, compiler, flags, () if isinstance(needed, set) else needed) == portable
