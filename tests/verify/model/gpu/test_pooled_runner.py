"""Runners as on a GPU: caches in a pool, reserved before a forward; recurrent layers; draft heads."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify import controller
from outrider.verify import stream as streams
from outrider.verify.heads.model import HeadCache, HeadModel, HeadRunner
from outrider.verify.model import invariance
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.gpu.text_work import BLOCK
from outrider.verify.model.invariance import Tree, start
from outrider.verify.model.recurrent import states
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier
from tests.decoding import check_sessions, prefill, verify
from tests.server.worker.fakes import Rig, request
from tests.slow import mostly_slow
from tests.verify.heads.checkpoints import load_pair
from tests.verify.model.families import build, config_of, random_model
from tests.verify.model.gpu.conftest import DEVICE, PAGE
from tests.verify.model.gpu.emulated_devices import emulated_devices
from tests.verify.model.gpu.test_devices import FIRST, SECOND
from tests.verify.model.gpu.test_graphs import POSITIONS, Graphed

CONTEXT = 128
Make = Callable[[torch.dtype], TorchRunner]


@pytest.fixture
def make(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a runner that is not started, of a small model."""
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    torch.manual_seed(1)
    return lambda dtype: TorchRunner(LlamaForCausalLM(tiny_config).to(DEVICE, dtype), CONTEXT, compile="off", started=False)


@pytest.mark.parametrize(
    ("dtype", "rows", "trees"),
    [
        pytest.param(torch.float32, 8, (Tree(70, 2),), marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 16, (Tree(61, 5), Tree(70, 12, beside=2)), marks=pytest.mark.slow),
    ],
)
def test_trees_beside_streams_have_the_bits_of_single_tokens(
    make: Make,
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
def test_a_prompts_keys_and_values_do_not_depend_on_how_it_was_cut(make: Make) -> None:
    """In more rows than a graph has, in fewer than the range has, and across a block's end."""
    runner, tokens = make(torch.bfloat16), list(range(3, 33))
    runner.start(CONTEXT, (16,))
    pages, logits = [], []
    for cuts in ((30,), (17, 13), (12, 17, 1)):
        cache, start = runner.new_cache(), BLOCK - 16
        cache.fill(start, torch.Generator(runner.device).manual_seed(0))
        for size in cuts:
            read = cache.length - start
            last = runner.forward(cache, ForwardBatch.chain(tokens[read : read + size]), logits=False).clone()
            cache.length += size
        pages.append([torch.as_tensor(part).clone() for part in cache.parts(cache.length)])
        logits.append(last)
    for found, of_row in zip(pages[1:], logits[1:], strict=True):
        assert all(torch.equal(part, first) for part, first in zip(found, pages[0], strict=True))
        assert torch.equal(of_row, logits[0])


def test_all_rows_of_a_long_chain_have_logits(make: Make) -> None:
    runner, tokens = make(torch.float32), range(3, 13)
    expected = TorchRunner(runner.model, CONTEXT, started=False)
    runner.start(CONTEXT, (8,))
    found = runner.forward(runner.new_cache(), ForwardBatch.chain(tokens))
    assert torch.allclose(found, expected.forward(expected.new_cache(), ForwardBatch.chain(tokens)), atol=1e-4)


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


# The interpreter takes a second for a layer of a few rows.
LAYERS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
# States beside attention, which decay by head or by channel; keys wider than values, with experts in groups or in none; layers
# with a window and without; layers of two shapes, which others read, too; and states alone.
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_5": {**LAYERS, "linear_num_value_heads": 1, "linear_num_key_heads": 1},
    "kimi_linear": {**LAYERS, "linear_num_heads": 1, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v3": {"num_hidden_layers": 2},
    "glm4_moe_lite": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {},
    "mamba2": {"num_hidden_layers": 2},
}


def mixed_steps(forward: Callable[[list[Segment]], torch.Tensor], caches: list[TensorCache]) -> torch.Tensor:
    """Logits of a tree of one stream and a token of another, twice: the streams change places after a commit."""
    ancestors = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], np.bool_)
    tree = ForwardBatch(np.array([5, 6, 7]), np.array([0, 1, 1]), ancestors)
    found = []
    for first, second in (caches, caches[::-1]):
        found.append(forward([Segment(first, tree), Segment(second, ForwardBatch.chain(torch.tensor([9])))]).cpu())
        first.commit([0, 2])
        second.commit([0])
    return torch.cat(found)


ON_SEVERAL = [*((family, 1) for family in KINDS), ("mamba2", 2)]  # devices, each with states


@pytest.mark.parametrize(
    ("family", "count"), mostly_slow(ON_SEVERAL, ("kimi_linear", 1), ("deepseek_v3", 1), ("gemma3", 1), ("mamba2", 2))
)
def test_a_replay_computes_other_streams(family: str, count: int) -> None:
    """A captured step reads where the rows and states of its streams are, and which rows their trees have."""
    config = config_of(family, NAME, **KINDS[family])
    reference = TorchRunner(random_model(config, NAME), started=False)
    expected = mixed_steps(lambda segments: torch.cat(reference.forward_all(segments)), [reference.new_cache() for _ in "ab"])
    with emulated_devices() as devices:
        model = random_model(config, NAME)
        Placement(model, (FIRST, SECOND)[:count]).move()
        graphs = Graphed(TorchRunner(model, started=False))
        graphs.forward.capture_rows(4, devices.capture)
        found = mixed_steps(lambda segments: graphs(*segments), [PagedCache(graphs.pool, POSITIONS) for _ in "ab"])
        assert graphs.forward._graphs.keys() == {4}
    assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "count"), ON_SEVERAL)
def test_sessions_are_reused_forked_rewound_and_swapped(family: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)
    sizes = KINDS[family]
    reference = TorchRunner(build(family, NAME, **sizes).to(DEVICE), 300, started=False)  # whose caches are contiguous
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    with nullcontext() if count == 1 else emulated_devices():
        model = build(family, NAME, **sizes)
        Placement(model, (DEVICE,) if count == 1 else (FIRST, SECOND)).move()
        runner = TorchRunner(model, 300, compile="off", started=False)
        runner.pages = 24
        runner.start(300)
        for _ in check_sessions(runner, 3, share=0.5, added=(1, 3, 100), tokens=4, reference=reference):
            pass


GREEDY = SamplingParams(temperature=0)
KEPT_STATES = 24
# Earlier versions look for the layer under other names than the tests' checkpoint has.
LOADS_MTP = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="needs transformers 5.23")
Pair = tuple[ModelRunner, HeadModel]


def drafts(pair: Pair, tokens: int) -> tuple[list[list[list[int]]], HeadCache]:
    """Candidates after a text of `tokens`, and below some of them, before and after the target emits one; and the cache."""
    target, head = pair
    target.cache_shape = replace(target.cache_shape, hidden_positions=KEPT_STATES)
    pool = cast(TorchRunner, target)._pool
    if pool is not None:
        pool.shape = target.cache_shape
    shared = HeadRunner(head)
    verifier, session = Verifier(target, target.new_cache()), shared.session()
    verifier.begin((np.arange(tokens) % 90).astype(np.int32), GREEDY, 8)
    prefill(verifier)
    session.begin(verifier.sequence)
    found = []
    for _ in range(2):
        root = session.root(3).tokens
        below = session.expand(root[0, :2].tolist(), [0, 0], 3).tokens
        deeper = session.expand([below[1, 2]], [2], 3).tokens
        found += [root.tolist(), below.tolist(), deeper.tolist()]
        verdict = verify(verifier)
        verifier.commit(verdict)
        session.advance(verdict.tokens)
    cache = next(iter(shared._caches.values()))
    assert isinstance(cache, HeadCache)
    return found, cache


@pytest.mark.parametrize("tokens", [12, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param("eagle", marks=pytest.mark.slow), "eagle3", pytest.param("mtp", marks=[pytest.mark.slow, LOADS_MTP])]
)
def test_a_head_in_pages_drafts_the_same(kind: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a text whose first states were not kept."""
    expected, reference = drafts(load_pair(tmp_path, kind), tokens)
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    found, cache = drafts(load_pair(tmp_path, kind, device=DEVICE.type), tokens)
    assert found == expected
    assert isinstance(cache.rows, PagedCache)
    assert (cache.first, cache.length) == (reference.first, reference.length)
    assert (cache.first > 1) == (tokens > KEPT_STATES)  # no state is before the first token
