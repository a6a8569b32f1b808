"""Compiles kernels for compute capability 9.0, which needs no GPU: the compiler may reject what the interpreter accepts."""

from __future__ import annotations

import os
import subprocess
import sys

BUILD = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def build(kernel, kinds, **constants):
    kinds = {name: "constexpr" if name in constants else kinds.get(name, "i32") for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cubin" in compiled.asm and compiled.metadata.shared <= 227 * 1024
"""


def compile_for_gpu(calls: str) -> None:
    """Runs calls of `build` in a subprocess, since this process uses the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", BUILD + calls], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
