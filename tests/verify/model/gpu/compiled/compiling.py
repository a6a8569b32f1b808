"""Compiles kernels for GPUs as they are launched, which needs none: the compiler may reject what the interpreter accepts.

As a program, it compiles the kernels of one of CASES for a GPU, and writes what each uses as JSON: a process that uses Triton's
interpreter cannot compile.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

# Bytes of shared memory that a program may have, by compute capability.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# AMD's MI300, which has no compute capability; the bytes of its local memory, and its matrix instructions.
GFX942, LOCAL_BYTES, MATRIX_INSTRUCTIONS = 0, 64 << 10, r"\bv_mfma_"
# Matrix instructions of Ampere to Ada and Blackwell for workstations, of Hopper, and of Blackwell for data centres.
TENSOR_CORE_INSTRUCTIONS = r"\b(?:HMMA|HGMMA|UTC\w*MMA)"
ROWS = 256
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
CACHES = {torch.int8: 4, torch.float8_e4m3fn: 4}  # bytes of a row's scale


@dataclass(frozen=True)
class Usage:
    kernel: str
    registers: int  # of a thread
    stack_bytes: int  # of a thread; more than 0 if registers are spilled
    shared_bytes: int
    tensor_core_instructions: int
    barriers: int = 0  # of the innermost loop of products, or of the whole kernel
    instructions_per_weight: float = 0.0  # of all threads, in the innermost loop of a product of weights
    waits_first: bool = False  # whether it waits for the kernel before, and touches no memory until then
    awaits_ranks: bool = False  # whether it waits for other GPUs before it reads what they have stored


def usages(case: str, capability: int) -> list[Usage]:
    """Compiles the kernels of a case in another process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.verify.model.gpu.compiled.compiling", case, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Usage(**each) for each in json.loads(done.stdout)]


def tensor(*shape: int, dtype: torch.dtype = FLOAT32) -> torch.Tensor:
    return torch.empty(1, *shape[1:], dtype=dtype).expand(shape)


def attention(
    capability: int, dtype: torch.dtype, head_dim: int, cache: torch.dtype | None = None, window: int = 0, heads: int = 32
) -> None:
    """The kernels of tree attention with eight key heads, and 131,072 positions; rotated, and as they are.

    With as many query heads, values have 128 numbers, as in latent attention.
    """
    from outrider.verify.model.gpu.text_work import SPLIT_KEYS, split_count
    from outrider.verify.model.gpu.triton_attention import tree_attention

    value_dim, scale_bytes = 128 if heads == 8 else head_dim, CACHES.get(cache, 0) if cache else 0
    sizes_of = (heads, head_dim), (8, head_dim), (8, value_dim)
    query, key, value = (torch.empty(ROWS, *size, dtype=dtype).transpose(0, 1) for size in sizes_of)
    pool = [torch.empty(1, 2, 8, 256, width + scale_bytes, dtype=cache or dtype) for width in (head_dim, value_dim)]
    tables = torch.empty(6, ROWS, dtype=torch.int64), torch.empty(ROWS, dtype=torch.int64)
    sinks, softcap = (torch.empty(32, dtype=dtype), 30.0) if window else (None, 0.0)
    sizes = (0, 1, SPLIT_KEYS, split_count(131_072, SPLIT_KEYS), capability, heads // 8, 0.1, window, softcap, sinks)
    gain = torch.empty(head_dim, dtype=dtype)
    for rotation in ((), (torch.empty(9, head_dim), tables[1], gain, gain, 1e-6)):
        tree_attention(query, key, value, *pool, *tables, *sizes, *rotation)


def weights_of(outputs: int, inputs: int, form: str) -> list[torch.Tensor | None]:
    """The planes of a form, or of 16 bits."""
    from outrider.verify.model.gpu.forms import Form

    if form == "16 bits":
        return [tensor(outputs, inputs, dtype=BFLOAT16), None, None, None]
    sizes: Form = forms()[form]
    words, scales, *others = (tensor(*shape, dtype=dtype) for dtype, shape in sizes.planes(outputs, inputs))
    return [words, scales, others.pop(0) if sizes.minimums is not None else None, *others, *[None] * (sizes.factors is None)]


def forms() -> dict[str, Any]:
    """The forms that differ for a kernel, by the types of files that have them."""
    from outrider.verify.model.gpu.forms import INT4, INT8
    from outrider.verify.model.gpu.stored_blocks import KINDS

    return {"8 bits": INT8, "4 bits": INT4} | {kind.name: each.form for kind, each in KINDS.items()}


def products(capability: int, form: str = "16 bits", kind: str = "plain") -> None:
    """The kernel of linear layers in bfloat16, for few and many rows and outputs."""
    from outrider.verify.model.gpu.triton_products import SUMMED, counters, linear, linear_residual, split_of

    many = 8192 if kind == "residuals" else 128_256
    for count, outputs in ((1, 4096), (64, 4096), (136, 4096), (72, many), (136, many), (256, many)):
        rows, parts = torch.empty(count, 4096, dtype=BFLOAT16), weights_of(outputs, 4096, form)
        bias = None if kind == "gates" else torch.empty(outputs, dtype=BFLOAT16)
        weights = (*parts, bias, counters(outputs, rows.device), split_of(4096, outputs))
        if kind == "residuals":
            linear_residual(rows, *weights, torch.empty(count, outputs, dtype=BFLOAT16), torch.empty(outputs, dtype=BFLOAT16))
        else:
            linear(rows, *weights, *((torch.empty(count, 4096 // SUMMED), 1e-6, True) if kind == "gates" else ()))


def ranks(capability: int, form: str = "16 bits") -> None:
    """The kernels by which two GPUs exchange parts of sums and logits, for few rows and many."""
    from outrider.verify.model.gpu.exchange import add_parts, await_ranks, publish
    from outrider.verify.model.gpu.triton_products import SUMMED, counters

    mailboxes = torch.empty(3, dtype=torch.int64)
    exchange = torch.empty(64), mailboxes, torch.empty(2, dtype=torch.int64), 1
    for count in (1, 64, 136):
        for inputs, outputs in ((2048, 4096), (4096, 64_128)):
            rows, arrived = torch.empty(count, inputs, dtype=BFLOAT16), counters(outputs, mailboxes.device)
            weights = (*weights_of(outputs, inputs, form), None, arrived, min(inputs, 1024))
            normed = (torch.empty(count, inputs // SUMMED), 1e-6) if outputs > inputs * 2 else ()
            publish(rows, *weights, *exchange, outputs if normed else 2, 2 * outputs, *normed)
        residual = torch.empty(count, 4096, dtype=BFLOAT16)
        add_parts(residual, residual[0], None, *exchange, 4, 1 << 22)
    await_ranks(*exchange)


def embedding(capability: int) -> None:
    from outrider.verify.model.gpu.triton_products import embed

    embed(torch.empty(ROWS, dtype=torch.int64), tensor(128_256, 4096, dtype=BFLOAT16), torch.empty(4096, dtype=BFLOAT16))


def experts(capability: int, form: str = "16 bits") -> None:
    """The kernels of a mixture of 128 experts of which a row chooses 8, for one row, few and many."""
    from outrider.verify.model.gpu.triton_experts import choose_experts, counters
    from outrider.verify.model.gpu.triton_experts import experts as compute

    hidden, width, count = 2048, 768, 128
    gate_up, down = (
        weights_of(count * size, inputs, form) for size, inputs in ((2 * width, hidden), (hidden, width))
    )  # fmt: skip
    touched = torch.empty(1, dtype=torch.int32)
    for number in (1, 16, 2048):
        rows, logits = (torch.empty(number, size, dtype=BFLOAT16) for size in (hidden, count))
        choose_experts(logits, torch.empty(count), 8, True, True, 0.0, 1.0, FLOAT32, 8, 4)
        shares, index = choose_experts(logits, None, 8, False, True, 0.0, 1.0, BFLOAT16)
        compute(rows, index, shares, gate_up, down, [], counters(hidden, rows.device), touched, "silu", False, 1.0, 0.0)


def recurrence(capability: int, key_dim: int, value_dim: int, is_delta: bool, by_channel: bool = False) -> None:
    from outrider.verify.model.gpu.device_rows import DeviceStates
    from outrider.verify.model.gpu.triton_recurrence import convolve, fold, scan, sum_paths
    from outrider.verify.model.recurrent.states import RecurrentShape

    heads, channels, decay_dim = 4, 8192, key_dim if by_channel else 1
    shape = RecurrentShape(1, 3, channels, 1, heads, key_dim, value_dim, decay_dim, BFLOAT16, torch.device("cpu"))
    states = DeviceStates(shape, ROWS)
    tables = states.rows, states.streams
    queries, keys, values = (torch.empty(heads, ROWS, size) for size in (key_dim, key_dim, value_dim))
    beta, decays = torch.empty(heads, ROWS), torch.empty(heads, ROWS, decay_dim)
    sums = sum_paths(decays, *tables) if by_channel else None
    scan(queries, keys, values, decays, sums, beta if is_delta else None, *tables, 1)
    convolve(
        torch.empty(ROWS, channels, dtype=BFLOAT16),
        torch.empty(channels, 4, dtype=BFLOAT16),
        torch.empty(channels, dtype=BFLOAT16),
        *tables,
        1,
    )
    fold(states, 2)


def sampling(capability: int, dtype: torch.dtype, draws: int = 1) -> None:
    from outrider.verify.model.gpu.triton_sampling import choose_tokens, likeliest_tokens

    logits = torch.empty(ROWS, 128_256, dtype=dtype)
    likeliest_tokens(logits, 8)
    choose_tokens(logits, likeliest_tokens(logits, 1)[2], torch.empty(5, ROWS, dtype=torch.int64), draws)


# The forms of weights; those of files have no minimums, or minimums that count scales, or factors of both, or 4-bit floats.
FORMS = ("16 bits", "8 bits", "4 bits", "Q4_0", "ZERO4", "ZERO8", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XS", "NVFP4")
GATED = ("16 bits", "4 bits", "Q4_K", "Q6_K")
# By name: what launches the kernels.
CASES: dict[str, Callable[[int], None]] = {
    "attention": partial(attention, dtype=BFLOAT16, head_dim=128),
    "attention in float16": partial(attention, dtype=FLOAT16, head_dim=128),
    "attention in float32": partial(attention, dtype=FLOAT32, head_dim=128),
    "attention of 64 in float32": partial(attention, dtype=FLOAT32, head_dim=64),
    "attention to int8": partial(attention, dtype=BFLOAT16, head_dim=128, cache=torch.int8),
    "attention to fp8": partial(attention, dtype=BFLOAT16, head_dim=128, cache=torch.float8_e4m3fn),
    "heads of 64 with a window": partial(attention, dtype=BFLOAT16, head_dim=64, window=32),
    "heads of 256 with a window": partial(attention, dtype=BFLOAT16, head_dim=256, window=32),
    "latent attention": partial(attention, dtype=BFLOAT16, head_dim=192, heads=8),
    "embedding": embedding,
    **{f"products of {form}": partial(products, form=form) for form in FORMS},
    **{f"{kind} of {form}": partial(products, form=form, kind=kind) for kind in ("gates", "residuals") for form in GATED},
    **{f"ranks of {form}": partial(ranks, form=form) for form in GATED},
    **{f"experts of {form}": partial(experts, form=form) for form in FORMS},
    "delta rule": partial(recurrence, key_dim=128, value_dim=128, is_delta=True),
    "delta rule by channel": partial(recurrence, key_dim=128, value_dim=128, is_delta=True, by_channel=True),
    "Mamba": partial(recurrence, key_dim=256, value_dim=64, is_delta=False),
    "a sample": partial(sampling, dtype=BFLOAT16),
    "a sample in float16": partial(sampling, dtype=FLOAT16),
    "a sample in float32": partial(sampling, dtype=FLOAT32),
    "samples": partial(sampling, dtype=BFLOAT16, draws=8),
}


@contextmanager
def compiled(capability: int) -> Iterator[list[tuple[str, Any, int]]]:
    """Kernels that are launched inside are compiled for this GPU; listed by name, with the weights of a block if there are."""
    torch.version.hip = "7" if capability == GFX942 else None  # before kernels are imported
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from outrider.verify.model.gpu import text_work, tiles, triton_experts, triton_products

    found: list[tuple[str, Any, int]] = []
    target = GPUTarget("hip", "gfx942", 64) if capability == GFX942 else GPUTarget("cuda", capability, 32)
    gpu = tiles.Gpu(132, SHARED_BYTES.get(capability, LOCAL_BYTES) - 1024, capability)
    functions = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
    here = type("Gpu", (), {name: lambda *_, value=value: value for name, value in functions.items()})()
    for module, name, value in (
        (text_work, "capability", capability),
        (triton_products, "capability", capability),
        (triton_products, "gpu_of", gpu),
        (triton_experts, "gpu_of", gpu),
    ):
        setattr(module, name, lambda _, value=value: value)
    driver.set_active(here)
    jit: Any = JITFunction
    run = jit.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
        weights = options.get("block_outputs", 0) * options.get("block_inputs", 0)
        found.append((kernel.fn.__name__, run(kernel, *args, **options | {"warmup": True}), weights))

    jit.run = compile_only
    yield found


def inner_loop(code: str) -> list[str]:
    """The machine instructions of the shortest loop with matrix instructions; all if there is none."""
    found: list[str] = []
    labels: dict[str, int] = {}
    loops: list[list[str]] = []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+([^;]+);", line):
            found.append(instruction[1])
            branch = re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", instruction[1])
            if branch and branch[1] in labels:
                loops.append(found[labels[branch[1]] :])
    return min((each for each in loops if re.search(TENSOR_CORE_INSTRUCTIONS, " ".join(each))), key=len, default=found)


def usage(name: str, kernel: Any, weights: int = 0) -> Usage:
    """What a kernel uses, by the tools of CUDA that Triton's package has."""
    import triton

    if "amdgcn" in kernel.asm:
        code = kernel.asm["amdgcn"]
        registers, spilled = (re.search(rf"\.vgpr_{part}:\s+(\d+)", code) for part in ("count", "spill_count"))
        assert registers is not None and spilled is not None
        matrix = len(re.findall(MATRIX_INSTRUCTIONS, code))
        return Usage(name, int(registers[1]), 4 * int(spilled[1]), kernel.metadata.shared, matrix)
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        resources, instructions = (
            subprocess.run([folder / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            for tool, *options in (("cuobjdump", "-res-usage"), ("nvdisasm",))
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", resources)
    assert found is not None
    matrix, loop = len(re.findall(TENSOR_CORE_INSTRUCTIONS, instructions)), inner_loop(instructions)
    barriers = sum(bool(re.search(r"\bBAR\.", each)) for each in loop)
    per_weight = round(len(loop) * 32 * kernel.metadata.num_warps / weights, 2) if weights else 0.0
    code = kernel.asm["ptx"]
    before, wait, _ = code.partition("griddepcontrol.wait")
    awaits_ranks = 0 < code.find("ld.acquire.sys") < code.find("ld.global.cg")
    waits_first = bool(wait) and not re.search(r"\b(?:ld|st|atom|red|cp\.async\S*)\.(?:\w+\.)*global", before)
    return Usage(
        name, int(found[1]), int(found[2]), kernel.metadata.shared, matrix, barriers, per_weight, waits_first, awaits_ranks
    )


if __name__ == "__main__":
    with compiled(int(sys.argv[2])) as kernels:
        CASES[sys.argv[1]](int(sys.argv[2]))
    json.dump([asdict(usage(*each)) for each in kernels], sys.stdout)
