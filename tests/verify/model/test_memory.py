"""Memory does not grow with the number of steps, and is not mapped again for every tensor."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import numpy as np
import pytest
import torch

from drafters.registry import Resources, make
from verify.decode import step
from verify.generation import DecodeOptions, Generation
from verify.model.memory import discard, keep_freed_memory, zeros
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

STATUS = Path("/proc/self/status")
WARM_STEPS, STEPS = 2_000, 10_000


def resident_kilobytes() -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="needs /proc/self/status")
def test_ten_thousand_steps_of_one_session(tiny_runner: ModelRunner) -> None:
    """Greedy and sampled requests in one session, with a drafter that learns from them."""
    verifier = TreeVerifier(tiny_runner, tiny_runner.new_cache())
    drafter = make("fusion", Resources(vocabulary=98))
    steps, warm, turn = 0, 0, 0
    while steps < STEPS:
        prompt = np.random.default_rng(turn).integers(3, 97, 10).astype(np.int32)
        params = SamplingParams(temperature=turn % 2, seed=turn, frequency_penalty=0.1 * (turn % 3), logprobs=turn % 5 or None)
        generation = Generation(verifier, drafter, prompt, DecodeOptions(params, 100, max_nodes=8))
        while step(generation).finish is None:
            steps += 1
        generation.close()
        turn += 1
        if not warm and steps > WARM_STEPS:
            warm = resident_kilobytes()
    assert resident_kilobytes() - warm < 8_000


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_large_tensors_get_the_memory_of_freed_ones() -> None:
    """A row of float32 logits over 150,000 tokens is larger than what glibc keeps by default."""
    keep_freed_memory()

    def page_faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(100):
            row = torch.ones(150_000)
            (row * 2, row + 1)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    page_faults()
    assert page_faults() < 1000  # more than 10,000 if every row is mapped again


@pytest.mark.skipif(platform.system() != "Linux", reason="memory is returned on Linux only")
def test_discarded_parts_are_zero_and_take_no_memory() -> None:
    pages = zeros((4000, resource.getpagesize()), torch.uint8, torch.device("cpu"))
    pages.fill_(1)
    before = resident_kilobytes()
    discard([pages[10:3990], pages[3995].flatten()[1:]])  # the second part contains no whole page
    assert before - resident_kilobytes() > 3000 * resource.getpagesize() // 1024
    assert pages[:, 0].nonzero()[:, 0].tolist() == [*range(10), *range(3990, 4000)]
