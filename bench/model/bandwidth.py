"""The physical limit of single-stream decoding: every step reads all weights once."""

from __future__ import annotations

import resource
import time

import torch

from outrider.verify.model.runner import ModelRunner

CPU_PROBE_BYTES = 1 << 28
GPU_PROBE_BYTES = 1 << 32
REPEATS = 7


@torch.inference_mode()
def read_bytes_per_second(runner: ModelRunner) -> float:
    """Measured read bandwidth of the runner's device with its threads: the best of several sums over a large tensor."""
    on_gpu = runner.device.type == "cuda"
    size = min(GPU_PROBE_BYTES, torch.cuda.mem_get_info(runner.device)[0] // 2) if on_gpu else CPU_PROBE_BYTES
    memory = torch.ones(size // 8, device=str(runner.device))
    before, times = torch.get_num_threads(), []
    torch.set_num_threads(runner.threads or before)
    for _ in range(REPEATS):
        started = time.perf_counter()
        memory.sum().item()
        times.append(time.perf_counter() - started)
    torch.set_num_threads(before)
    return memory.nbytes / min(times)


def peak_memory_mb() -> int:
    """Peak memory of this process in MiB: GPU memory if there is a GPU, else resident memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
