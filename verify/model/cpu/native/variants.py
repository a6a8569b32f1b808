"""The variants of the compiled library, and which of them run on this machine.

setup.py runs this file before the package is installed, so it imports nothing of it.
"""

import ctypes
import platform
from pathlib import Path

FOLDER = Path(__file__).parent
# Flags of /proc/cpuinfo that a variant needs, the fastest variant first.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
X86 = {"amx": AVX512 | {"amx_tile", "amx_int8"}, "avx512": AVX512, "avxvnni": AVX2 | {"avx_vnni"}, "avx2": AVX2}
ARM = {"i8mm": {"asimddp", "i8mm"}, "dotprod": {"asimddp"}}
# Those of this machine.
VARIANTS: dict[str, set[str]] = {"x86_64": X86, "AMD64": X86, "aarch64": ARM}.get(platform.machine(), {}) | {"portable": set()}

# arch_prctl of Linux: its number on x86, the request for a state that is not saved by default, and that of the tile registers.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18


def runnable() -> list[Path]:
    """The files of the compiled variants that run here, the fastest one first."""
    flags = processor_flags()
    if "amx_tile" in flags and ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA):
        flags.discard("amx_tile")  # the system does not let us use them
    # Earlier builds, which may lie beside them, have longer names.
    return [
        file for name, needed in VARIANTS.items() if needed <= flags for file in sorted(FOLDER.glob(f"_{name}.*"), reverse=True)
    ]


def processor_flags() -> set[str]:
    """The CPU's features, by the names of /proc/cpuinfo; empty without that file, and for machines of other kinds."""
    name = {"x86_64": "flags", "AMD64": "flags", "aarch64": "Features"}.get(platform.machine())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if name and line.startswith(name)), set())
