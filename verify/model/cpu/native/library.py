"""The compiled library: its variants for kinds of CPUs, its structures, and threads that run it.

Each variant is the same source, compiled for other instructions (setup.py). They compute the same values, but pack weights in
layouts of their own.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent
# Flags of /proc/cpuinfo that a variant needs, the fastest variant first.
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}
X86 = {"amx": AVX512 | {"amx_tile", "amx_int8"}, "avx512": AVX512, "avxvnni": AVX2 | {"avx_vnni"}, "avx2": AVX2}
ARM = {"i8mm": {"asimddp", "i8mm"}, "dotprod": {"asimddp"}}
# Those of this machine.
VARIANTS: dict[str, set[str]] = {"x86_64": X86, "AMD64": X86, "aarch64": ARM}.get(platform.machine(), {}) | {"portable": set()}

# The linear layers of a decoder's layer.
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")


class Matrix(Structure):
    """`Matrix` in matrix.h."""

    _fields_ = (("kind", c_int32), ("outputs", c_int32), ("inputs", c_int32), ("data", c_void_p))


class Linear(Structure):
    """`Linear` in forward.cpp."""

    _fields_ = (("matrix", Matrix), ("bias", c_void_p))


class Layer(Structure):
    """`Layer` in forward.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "feed_forward_norm", "query_norm", "key_norm")),
        *((name, Linear) for name in PROJECTIONS),
        ("cached", c_int32),
        ("window", c_int32),
        ("rotary", c_int32),
    )


class Model(Structure):
    """`Model` in forward.cpp."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "activation")),
        *((name, c_float) for name in ("epsilon", "scaling", "rotary_scaling")),
        *((name, c_float) for name in ("embedding_scale", "residual_scale", "logit_scale")),
        ("layer", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Linear),
        ("norm", c_void_p),
        ("frequencies", c_void_p),
    )


class LowRank(Structure):
    """`LowRank` in forward.cpp."""

    _fields_ = (("down", Matrix), ("up", Matrix))


class AdapterLayer(Structure):
    """`AdapterLayer` in forward.cpp."""

    _fields_ = tuple((name, LowRank) for name in PROJECTIONS)


class Adapter(Structure):
    """`Adapter` in forward.cpp."""

    _fields_ = (("layer", POINTER(AdapterLayer)), ("rank", c_int32))


class Tap(Structure):
    """`Tap` in forward.cpp."""

    _fields_ = (("count", c_int32), ("layers", c_void_p), ("states", c_void_p))


class Stream(Structure):
    """`Stream` in forward.cpp."""

    _fields_ = (
        ("cache", c_void_p),
        *((name, c_int64) for name in ("layer_stride", "part_stride", "head_stride", "position_stride")),
        *((name, c_int32) for name in ("stored", "rows", "start", "length", "kept", "padding")),
        ("tokens", c_void_p),
        ("depths", c_void_p),
        ("counts", c_void_p),
        ("slots", c_void_p),
        ("adapter", POINTER(Adapter)),
    )


# arch_prctl of Linux: its number on x86, the request for a state that is not saved by default, and that of the tile registers.
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA = 158, 0x1023, 18


@cache
def compiled_library() -> ctypes.CDLL | None:
    """The fastest variant for this CPU; None if none was compiled."""
    return next(map(load, runnable()), None)


def variant() -> str:
    """The name of `compiled_library`'s variant; empty if none was compiled."""
    found = compiled_library()
    return "" if found is None else Path(found._name).name.partition(".")[0].removeprefix("_")


def runnable() -> list[Path]:
    """The files of the compiled variants that run here, the fastest one first."""
    flags = processor_flags()
    if "amx_tile" in flags and ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA):
        flags.discard("amx_tile")  # the system does not let us use them
    return [file for name, needed in VARIANTS.items() if needed <= flags for file in sorted(FOLDER.glob(f"_{name}.*"))]


def load(file: Path) -> ctypes.CDLL:
    """The library in a file, with the types of its functions."""
    found = ctypes.CDLL(str(file))
    found.outrider_engine_new.restype = c_void_p
    found.outrider_matrix_bytes.restype = c_int64
    return found


def processor_flags() -> set[str]:
    """What the CPU has, by the names of /proc/cpuinfo; empty where there is no such file, and for machines of other kinds."""
    name = {"x86_64": "flags", "AMD64": "flags", "aarch64": "Features"}.get(platform.machine())
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if name and line.startswith(name)), set())


class Engine:
    """Threads that run the library, one call at a time."""

    def __init__(self, threads: int, code: ctypes.CDLL | None = None) -> None:
        """Requires a compiled library."""
        found = code or compiled_library()
        assert found is not None
        self.library, self.threads = found, threads
        self._lock = threading.Lock()
        self._handle = c_void_p(found.outrider_engine_new(threads))

    @staticmethod
    @cache
    def shared() -> Engine:
        """An engine with a thread for each core, for packing and for products outside of a forward."""
        return Engine(os.cpu_count() or 1)

    def call(self, name: str, *arguments: object) -> None:
        """Calls a function that takes the engine first."""
        with self._lock:
            getattr(self.library, name)(self._handle, *arguments)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self.library.outrider_engine_delete(self._handle)
