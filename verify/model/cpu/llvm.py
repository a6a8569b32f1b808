"""LLVM, which compiles code in its own language for this CPU.

The language may change with every release of LLVM, above all the intrinsics for AMX. `panel_kernel`, `tile_kernel` and
`libtorch` write it. Tested with llvmlite 0.50, which has LLVM 22 and which numba needs as well.
`tests/verify/model/cpu/test_llvm.py` fails if the code of a kernel is not valid any more, also of one that this CPU cannot
run.

Without LLVM, `compiled` has to raise RuntimeError: `outrider.verify.model.cpu.panels` then has no kernels, and oneDNN
multiplies all layers (`outrider.verify.model.cpu.packing`). Steps of a few rows lose time, and a row may have other bits
beside other rows. The same loops can be written in C++, as those of `outrider.verify.model.cpu.native`; installing them needs
a compiler.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from llvmlite import binding


@cache
def processor() -> tuple[str, str]:
    """The CPU's name, and what it can do, as LLVM calls it."""
    return binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()


def has(feature: str) -> bool:
    """Whether this CPU has what LLVM calls `feature`."""
    return bool(binding.get_host_cpu_features().get(feature))


def machine(name: str, features: str) -> Any:
    """LLVM's compiler for a CPU of this machine's architecture."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    return binding.Target.from_default_triple().create_target_machine(cpu=name, features=features, opt=2)


def compiled(source: str, functions: Mapping[str, int], name: str) -> tuple[Any, int]:
    """Compiles code that calls functions at these addresses. Returns what must outlive the code, and the address of `name`.

    Raises RuntimeError.
    """
    found = machine(*processor())
    for each, address in functions.items():
        binding.add_symbol(each, address)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(source), found)
    engine.finalize_object()
    return engine, engine.get_function_address(name)
