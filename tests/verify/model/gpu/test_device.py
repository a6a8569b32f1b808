"""Tests that need a GPU: captured graphs are lossless, a step waits for one event alone, and no memory is allocated."""

import warnings

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider import models
from outrider.drafters.interface import DraftTree
from outrider.drafters.none import NoDrafter
from outrider.verify.decode import decode
from outrider.verify.model.attention.interface import Layer
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.backend import load_model
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.shape import CacheShape
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu import text_work, triton_attention
from outrider.verify.model.gpu.device_rows import DeviceRows, pieces_of
from outrider.verify.model.gpu.paged_cache import PagedCache, PagePool
from outrider.verify.model.gpu.text_work import TextWork
from outrider.verify.model.gpu.triton_attention import KernelAttention
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.decoding import answer_of, prefill, verify
from tests.drafts import Oracle
from tests.verify.model.gpu.test_triton_attention import random_tree

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
PROMPT = np.arange(5, 60, dtype=np.int32)


@pytest.fixture(scope="module", params=["off", "on"])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    return load_model(LoadOptions(str(models.TARGET), dtype="float32", device="cuda", compile=request.param))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafted_answers_equal_plain_decoding(runner: ModelRunner, temperature: float) -> None:
    options = DecodeOptions(SamplingParams(temperature=temperature, seed=3), max_tokens=80)
    plain = answer_of(runner, PROMPT, options).tokens
    drafter = Oracle(plain)
    assert answer_of(runner, PROMPT, options, drafter).tokens == plain


def test_greedy_text_equals_transformers(runner: ModelRunner) -> None:
    reference = LlamaForCausalLM.from_pretrained(models.TARGET, dtype=torch.float32).to("cuda")
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens=40)
    ours = answer_of(runner, PROMPT, options).tokens
    whole = reference.generate(
        torch.from_numpy(PROMPT).long()[None].cuda(), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert whole[0, len(PROMPT) :].tolist() == ours


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_waits_for_one_event_alone(runner: ModelRunner, temperature: float) -> None:
    chain = np.arange(5, dtype=np.int32)
    tree = DraftTree(chain, chain - 1, chain + 1, np.ones(5, np.float32), np.zeros(5, np.uint8))
    verifier = Verifier(runner, runner.new_cache())
    verifier.begin(PROMPT, SamplingParams(temperature=temperature), max_tokens=100)
    prefill(verifier)
    verify(verifier, tree, feedback=4)  # allocates memory
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            verify(verifier, tree, feedback=4)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not [warning for warning in caught if "called a synchronizing" in str(warning.message)]


def test_steps_allocate_no_memory(runner: ModelRunner) -> None:
    options = DecodeOptions(SamplingParams(temperature=1.0, seed=1), max_tokens=100)
    segments = []
    for _ in range(4):
        verifier = Verifier(runner, runner.new_cache())
        decode(verifier, NoDrafter(), PROMPT, options)
        segments.append(torch.cuda.memory_stats()["segment.all.allocated"])
    assert segments[-1] == segments[1]


@pytest.mark.parametrize("context", [1, 63, 4096, 32_768])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 128), (32, 8, 128), (32, 1, 64), (16, 2, 256)])
@torch.inference_mode()
def test_attention_in_bfloat16_is_that_in_float32(
    context: int, heads: int, kv_heads: int, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes that are served. Outputs reach 4, where bfloat16 has steps of 2^-6."""
    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", 256)
    monkeypatch.setattr(text_work, "SPLIT_KEYS", 256)
    monkeypatch.setattr(triton_attention, "PROGRAMS", 512)
    device, generator = torch.device("cuda"), torch.Generator("cuda").manual_seed(context + heads)
    shape = CacheShape.uniform(1, kv_heads, head_dim, torch.bfloat16, device)
    for rows in (1, 9, 129):
        pool = PagePool(shape, kv_cache.page_count(context + rows, kv_cache.PAGE_TOKENS))
        paged = PagedCache(pool, context + rows)
        paged.fill(context, generator)
        paged.reserve(rows)
        exact = TensorCache(CacheShape.uniform(1, kv_heads, head_dim, torch.float32, device), context + rows)
        exact.fork(paged, context)
        batch = random_tree(rows, torch.Generator().manual_seed(rows))
        query, key, value = (
            torch.randn(count, rows, head_dim, generator=generator, device=device).bfloat16()
            for count in (heads, kv_heads, kv_heads)
        )
        work = TextWork(head_dim, shape.dtype, heads // kv_heads, context + rows, [device])
        layer, device_rows = Layer(0, head_dim**-0.5), DeviceRows(device, 256, len(pool), work)
        device_rows.set(list(pieces_of(paged, batch)), rows)
        found = KernelAttention(pool, [device_rows]).attend(layer, query, key, value)
        expected = TorchAttention(exact, batch).attend(layer, query.float(), key.float(), value.float())
        assert (found.float() - expected).abs().max() < 0.03
