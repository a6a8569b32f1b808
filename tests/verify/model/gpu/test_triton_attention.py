"""The Triton kernels against the plain torch reference, on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")

from verify.model.attention import Layer, TorchAttention
from verify.model.batch import ForwardBatch
from verify.model.cache import CacheShape, KVCache
from verify.model.gpu.device_rows import DeviceRows
from verify.model.gpu.triton_attention import KernelAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LARGE_ROWS = 16  # larger cases are soak tests
SPARE_POSITIONS = 3  # beyond the text and the new rows

# heads, kv_heads, rows, head_dim, length, window, softcap, sinks
CASES: list[tuple[int, int, int, int, int, int | None, float | None, bool]] = [
    (4, 2, 1, 64, 0, None, None, False),  # the very first token
    (4, 4, 1, 64, 100, None, None, False),
    (4, 2, 5, 64, 64, None, None, False),  # a length of whole blocks
    (8, 1, 9, 80, 333, None, None, False),
    (8, 2, 65, 96, 300, None, None, False),  # the largest tree
    (4, 4, 17, 128, 1000, 64, None, False),
    (2, 1, 8, 256, 200, None, None, False),
    (4, 1, 9, 80, 77, 10, 30.0, False),
    (4, 2, 12, 32, 5, 2, None, True),  # the window is shorter than the tree is deep
]


def random_tree(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Ancestors, bool [rows, rows], of a tree with random parents."""
    ancestors = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        ancestors[row] |= ancestors[int(torch.randint(0, row, (1,), generator=generator))]
    return ancestors


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case[2] > LARGE_ROWS else [], id=str(case)) for case in CASES]
)
def test_the_kernel_equals_the_reference(case: tuple[int, int, int, int, int, int | None, float | None, bool]) -> None:
    heads, kv_heads, rows, head_dim, length, window, softcap, has_sinks = case
    generator = torch.Generator().manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    shape = CacheShape.uniform(2, kv_heads, head_dim, torch.float32, DEVICE)
    slot, reference = (KVCache(shape, length + rows + SPARE_POSITIONS) for _ in range(2))
    slot.tensor[:] = noise(*slot.tensor.shape)
    reference.tensor[:] = slot.tensor
    slot.length = reference.length = length
    ancestors = random_tree(rows, generator)
    query, key, value = (noise(rows, count, head_dim).transpose(0, 1) for count in (heads, kv_heads, kv_heads))  # as models do
    layer = Layer(1, head_dim**-0.5, window, softcap, noise(heads) if has_sinks else None)
    batch = ForwardBatch(torch.zeros(rows, dtype=torch.int64), ancestors.sum(1) - 1, ancestors)
    expected = TorchAttention(reference, batch).attend(layer, query, key, value)
    device_rows = DeviceRows(shape, 65)
    device_rows.set(slot, batch)
    found = KernelAttention(device_rows, rows, slot.positions).attend(layer, query, key, value)
    assert torch.allclose(found, expected, atol=2e-5 if softcap is None else 1e-4)
    assert torch.equal(slot.tensor, reference.tensor)  # the new rows are written, and nothing else


# Runs in a subprocess, since this process uses the interpreter.
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from verify.model.gpu import triton_attention as tree_kernel

KINDS = {name: "*i64" for name in ("location", "bits", "depths")} | {name: "*fp32" for name in ("parts", "lse")}
KINDS |= {name: "*bf16" for name in ("query", "key", "value", "anchor", "sinks")} | {"scaling": "fp32", "softcap": "fp32"}


def build(kernel, out, **constants):
    kinds = {name: "constexpr" if name in constants else KINDS.get(name, "i32") for name in kernel.arg_names}
    if "out" in kinds:
        kinds["out"] = out
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(kinds.values()) if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=kinds, constexprs=values, attrs=aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert "cubin" in compiled.asm and compiled.metadata.shared <= 227 * 1024


for dim, window, capped in ((64, 0, False), (96, 64, False), (128, 0, True), (256, 32, True)):
    padded = triton.next_power_of_2(dim)
    sizes = {"head_dim": dim, "padded_dim": padded}
    blocks = {"block_rows": 64, "block_keys": 64 if padded <= 128 else 32, "splits": tree_kernel.MAX_SPLITS}
    build(tree_kernel._attend_split, "*fp32", window=window, capped=capped, **sizes, **blocks)
    build(tree_kernel._combine, "*bf16", has_sinks=capped, splits=tree_kernel.MAX_SPLITS, padded_splits=64, **sizes)
    build(tree_kernel._write, "", **sizes)
"""


@pytest.mark.slow
def test_the_kernels_compile_for_a_gpu() -> None:
    """The compiler may reject what the interpreter accepts; compiling needs no GPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
