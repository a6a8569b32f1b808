"""A model runner as on a GPU: caches in a pool, reserved before a forward; requests that do not fit it wait."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify import controller
from outrider.verify import stream as streams
from outrider.verify.model import invariance
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.kv_cache import OutOfPages
from outrider.verify.model.gpu.text_work import BLOCK
from outrider.verify.model.invariance import Tree, start
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig, request
from tests.verify.model.gpu.conftest import DEVICE, PAGE

CONTEXT = 128


def chain(*tokens: int) -> ForwardBatch:
    return ForwardBatch.chain(torch.tensor(tokens))


@pytest.fixture
def make(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> Callable[[torch.dtype], TorchRunner]:
    """Makes a runner that is not started, of a small model."""
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    torch.manual_seed(1)
    return lambda dtype: TorchRunner(LlamaForCausalLM(tiny_config).to(DEVICE, dtype), CONTEXT, compile="off", started=False)


def test_a_forward_without_room_changes_nothing(make: Callable[[torch.dtype], TorchRunner]) -> None:
    runner = make(torch.float32)
    runner.pages = 3
    runner.start(CONTEXT)
    full, other = runner.new_cache(), runner.new_cache()
    runner.forward(full, chain(*range(5, 80)), logits=False)  # two pages
    full.length = 75
    before = [torch.as_tensor(part).clone() for part in full.parts(75)]
    segments = [Segment(other, chain(3)), Segment(full, chain(*range(60)), logits=False)]
    with pytest.raises(OutOfPages, match="2 more pages of the KV cache are needed, and 1 are free"):
        runner.forward_all(segments)
    assert all(torch.equal(torch.as_tensor(part), kept) for part, kept in zip(full.parts(75), before, strict=True))
    swapped = full.swap_out()
    alone = runner.forward(other, chain(3)).clone()
    other.truncate(0)
    full.fork(swapped, 75)
    assert torch.equal(runner.forward_all([Segment(other, chain(3))])[0], alone)


@pytest.mark.slow
@pytest.mark.parametrize("coded", [None, torch.int8])
def test_a_prompt_is_read_into_pages(make: Callable[[torch.dtype], TorchRunner], coded: torch.dtype | None) -> None:
    runner = make(torch.float32)
    reference = TorchRunner(runner.model, CONTEXT, started=False)
    for each in (runner, reference):
        each.cache_shape = replace(each.cache_shape, coded=coded)
    runner.start(CONTEXT)
    cache, tokens = runner.new_cache(), list(range(3, 93))
    whole = reference.forward(reference.new_cache(), chain(*tokens), logits=False)
    runner.forward(cache, chain(*tokens[:70]), logits=False)
    cache.length = 70
    found = runner.forward(cache, chain(*tokens[70:]), logits=False)
    assert torch.allclose(found, whole, atol=1e-4 if coded is None else 0.1)


@pytest.mark.parametrize(
    ("dtype", "rows", "trees"),
    [
        pytest.param(torch.float32, 8, (Tree(70, 2),), marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 16, (Tree(61, 5), Tree(70, 12, beside=2)), marks=pytest.mark.slow),
    ],
)
def test_trees_beside_streams_have_the_bits_of_single_tokens(
    make: Callable[[torch.dtype], TorchRunner],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rows: int,
    trees: tuple[Tree, ...],
) -> None:
    """In one number of rows, which needs nothing of this machine's kernels but that places do not matter."""
    runner = make(dtype)
    monkeypatch.setattr(invariance, "INVARIANT_ROWS", (rows,))
    monkeypatch.setattr(invariance, "TREES", trees)
    start(runner, CONTEXT, "auto", None)
    assert runner.invariance == "on"
    assert (runner.draft_depth(60), runner.max_rows) == (3, rows)


@pytest.mark.slow
def test_a_prompts_keys_and_values_do_not_depend_on_how_it_was_cut(make: Callable[[torch.dtype], TorchRunner]) -> None:
    """In more rows than a graph has, in fewer than the range has, and across a block's end."""
    runner, tokens = make(torch.bfloat16), list(range(3, 33))
    runner.start(CONTEXT, (16,))
    pages, logits = [], []
    for cuts in ((30,), (17, 13), (12, 17, 1)):
        cache, start = runner.new_cache(), BLOCK - 16
        cache.fill(start, torch.Generator(runner.device).manual_seed(0))
        for size in cuts:
            read = cache.length - start
            last = runner.forward(cache, chain(*tokens[read : read + size]), logits=False).clone()
            cache.length += size
        pages.append([torch.as_tensor(part).clone() for part in cache.parts(cache.length)])
        logits.append(last)
    for found, of_row in zip(pages[1:], logits[1:], strict=True):
        assert all(torch.equal(part, first) for part, first in zip(found, pages[0], strict=True))
        assert torch.equal(of_row, logits[0])


def test_all_rows_of_a_long_chain_have_logits(make: Callable[[torch.dtype], TorchRunner]) -> None:
    runner, tokens = make(torch.float32), range(3, 13)
    expected = TorchRunner(runner.model, CONTEXT, started=False)
    runner.start(CONTEXT, (8,))
    found = runner.forward(runner.new_cache(), chain(*tokens))
    assert torch.allclose(found, expected.forward(expected.new_cache(), chain(*tokens)), atol=1e-4)


PROMPTS = {"a": 70, "b": 33, "c": 66}  # tokens


def rig(config: LlamaConfig, pages: int, **settings: Any) -> Rig:
    torch.manual_seed(1)
    runner = TorchRunner(LlamaForCausalLM(config).to(DEVICE), 3 * PAGE, compile="off", started=False)
    runner.pages = pages
    runner.start(3 * PAGE)
    made = Rig(runner, **settings)
    made.worker._runtime.max_active = 3
    return made


def run(made: Rig) -> dict[str, list[int]]:
    """The answers of all requests, which come together."""
    made.send(*(request(id, prompt=[length - 30] * length, max_tokens=3, session=id) for id, length in PROMPTS.items()))
    made.step(30)
    return {id: made.tokens(id) for id in PROMPTS}


@pytest.mark.slow
def test_requests_that_do_not_fit_together_wait(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    for module in (streams, controller):
        monkeypatch.setattr(module, "PREFILL_CHUNK_TOKENS", PAGE)
    monkeypatch.setattr(streams, "MAX_NODES", 0)
    roomy, tight = rig(tiny_config, 12), rig(tiny_config, 4)
    expected = run(roomy)
    assert all(len(tokens) == 3 for tokens in expected.values())
    assert run(tight) == expected
    assert tight.worker.scheduler.is_idle
    swapped = [session.verifier.is_swapped_out for session in tight.worker.sessions._sessions.values()]
    assert len(swapped) == 3 and any(swapped)  # the sessions that are not in use made room
    for made in (roomy, tight):
        made.close()
