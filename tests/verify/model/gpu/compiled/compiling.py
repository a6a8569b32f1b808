"""Compiles kernels for GPUs, which needs none: the compiler may reject what the interpreter accepts, and tells what it uses.

As a program, it reads a list of `Variant` and writes a list of `Usage`, as JSON: a process that uses Triton's interpreter
cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

# Bytes of shared memory that a program may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# AMD's MI300, which has no compute capability; the bytes of its local memory, and its matrix instructions.
GFX942, LOCAL_BYTES, MATRIX_INSTRUCTIONS = 0, 64 << 10, r"\bv_mfma_"
# Matrix instructions of Ampere to Ada and Blackwell for workstations, of Hopper, and of Blackwell for data centres.
TENSOR_CORE_INSTRUCTIONS = r"\b(?:HMMA|HGMMA|UTC\w*MMA)"


@dataclass(frozen=True)
class Variant:
    """A kernel of `outrider.verify.model.gpu` with types and sizes."""

    capability: int  # such as 90 for sm_90; 0 = GFX942
    module: str
    kernel: str
    kinds: Mapping[str, str]  # types of arguments that are not i32
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None  # the most of a thread


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel uses."""

    registers: int  # of a thread
    stack_bytes: int  # of a thread; more than 0 if registers are spilled
    shared_bytes: int
    tensor_core_instructions: int
    waits_first: bool = False  # whether it waits for the kernel before, and touches no memory until then


def usages(variants: Sequence[Variant]) -> list[Usage]:
    """Compiles all variants in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.verify.model.gpu.compiled.compiling"]
    text = json.dumps([asdict(each) for each in variants])
    done = subprocess.run(command, env=environment, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Usage(**each) for each in json.loads(done.stdout)]


def usage(variant: Variant) -> Usage:
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    on_amd = variant.capability == GFX942
    torch.version.hip = "7" if on_amd else None  # what PyTorch for AMD's GPUs says, before kernels are imported
    kernel = getattr(import_module(f"outrider.verify.model.gpu.{variant.module}"), variant.kernel)
    constants, names = variant.constants, kernel.arg_names
    kinds = {name: "constexpr" if name in constants else variant.kinds.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if is_aligned(name, kinds[name])},
    )
    options: dict[str, int | None] = {"num_warps": variant.warps}
    if not on_amd:
        options |= {"num_stages": variant.stages, "maxnreg": variant.registers}
    if on_amd:
        compiled = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
        code = compiled.asm["amdgcn"]
        registers, spilled = (re.search(rf"\.vgpr_{name}:\s+(\d+)", code) for name in ("count", "spill_count"))
        assert registers is not None and spilled is not None
        matrix = len(re.findall(MATRIX_INSTRUCTIONS, code))
        return Usage(int(registers[1]), 4 * int(spilled[1]), compiled.metadata.shared, matrix)
    compiled = triton.compile(source, target=GPUTarget("cuda", variant.capability, 32), options=options)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        found = re.search(r"REG:(\d+) STACK:(\d+)", tool(folder / "cuobjdump", "-res-usage", file.name))
        instructions = tool(folder / "nvdisasm", file.name)
    assert found is not None
    matrix = len(re.findall(TENSOR_CORE_INSTRUCTIONS, instructions))
    before, wait, _ = compiled.asm["ptx"].partition("griddepcontrol.wait")
    waits_first = bool(wait) and not re.search(r"\b(?:ld|st|atom|red|cp\.async\S*)\.(?:\w+\.)*global", before)
    return Usage(int(found[1]), int(found[2]), compiled.metadata.shared, matrix, waits_first)


def is_aligned(name: str, kind: str) -> bool:
    """Whether Triton finds an argument to be a multiple of 16 in every launch: addresses, and strides of whole heads."""
    return kind.startswith("*") or name.endswith(("_head", "_row", "_stride", "_offset")) or name == "outputs"


def tool(program: Path, *arguments: str) -> str:
    """What one of CUDA's tools, which Triton's package has, says of a kernel."""
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    json.dump([asdict(usage(Variant(**each))) for each in json.load(sys.stdin)], sys.stdout)
