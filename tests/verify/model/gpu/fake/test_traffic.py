"""What a GPU launches and moves besides the forward of a step: budgets of launches and of bytes.

An operation's tensors count once, also those of a kernel that reads them several times, because the GPU's cache holds a row.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.model.fake_cuda import CUDA, Device, fake_cuda, fake_model
from bench.model.traffic import without_events
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling.device import choices
from outrider.verify.sampling.largest import likeliest
from outrider.verify.sampling_params import SamplingParams
from tests.verify.model.test_architectures import config_of

pytestmark = pytest.mark.slow
ROWS, VOCABULARY = 65, 128_256
LOGITS_BYTES = ROWS * VOCABULARY * 2
CHUNK = 512


def logits() -> torch.Tensor:
    return torch.empty(ROWS, VOCABULARY, dtype=torch.bfloat16, device=CUDA)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.05),
    ],
)
def test_tokens_are_chosen_in_few_launches(params: SamplingParams) -> None:
    """An upload, and an operation of two kernels, or two of five. What each reads is in the cache after the first."""
    with fake_cuda() as device, without_events():
        choices(logits(), params, range(ROWS), [])
    assert device.launches <= 8
    assert device.bytes <= 2.2 * LOGITS_BYTES


def test_feedback_reads_the_logits_once() -> None:
    with fake_cuda() as device:
        likeliest(logits(), 8)
    assert device.launches == 1  # an operation of two kernels
    assert device.bytes <= 1.1 * LOGITS_BYTES


def prompt(layers: int) -> Device:
    """What a Llama with this number of layers launches for a chunk of a prompt."""
    with fake_cuda() as device:
        config = config_of("llama", NAME, num_hidden_layers=layers, max_position_embeddings=2 * CHUNK)
        runner = TorchRunner(fake_model(config), 2 * CHUNK, compile="off", started=False)
        runner.pages = 32
        runner._pool = PagePool(runner.cache_shape, 32)
        cache = PagedCache(runner._pool, 2 * CHUNK)
        device.launches = 0
        runner.forward(cache, ForwardBatch.chain(np.zeros(CHUNK)), logits=False)
    return device


def test_a_chunk_of_a_prompt_stays_in_its_budget() -> None:
    pages = CHUNK // 64  # a write of keys and one of values for each
    assert prompt(4).launches - prompt(2).launches <= 2 * (2 * pages + 42)


def test_commits_of_several_streams_move_rows_in_few_launches() -> None:
    with fake_cuda() as device:
        runner = TorchRunner(fake_model(config_of("llama", NAME)), 64, compile="off", started=False)
        pool = PagePool(runner.cache_shape, 4)
        caches = [PagedCache(pool, 64) for _ in range(3)]
        for cache in caches:
            cache.reserve(9)
        device.launches = 0
        for cache in caches:
            cache.commit([0, 1, 2])
            cache.commit([0, 2, 5])
        assert device.launches == 0
        pool.settle()
    assert device.launches <= 3
