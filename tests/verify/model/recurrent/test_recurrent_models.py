"""Recurrent, mixed and older layers: transformers' logits, trees that equal their paths, lossless drafts, rewinding."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.drafters.interface import Drafter
from outrider.drafters.registry import Resources, make
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.gpu.devices import Placement
from outrider.verify.model.load_options import LoadOptions, Quantization
from outrider.verify.model.quantization import quantize_model
from outrider.verify.model.recurrent import states
from outrider.verify.model.recurrent.rows import advance, convolve, gather_index, scan
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from tests.decoding import answer_of, check_sessions
from tests.drafts import EAGER, Chaos, Oracle
from tests.verify.model.families import FAMILIES, REFUSED, build, compare, text_of, tolerance

FAST = "qwen3_5"
SERVED = [family for family in FAMILIES if family not in REFUSED]
ALL = [family if family == FAST else pytest.param(family, marks=pytest.mark.slow) for family in SERVED]


@functools.cache
def runner_of(family: str) -> TorchRunner:
    """A family's model, as it is served."""
    return TorchRunner(build(family, NAME), pack=True)


@pytest.mark.parametrize("family", ALL)
def test_logits_and_trees_equal_transformers(family: str) -> None:
    assert compare(runner_of(family), build(family, "eager")) < tolerance(family)


@pytest.mark.parametrize("family", ALL)
def test_drafting_is_lossless(family: str) -> None:
    runner = runner_of(family)
    prompt = np.arange(3, 15, dtype=np.int32)
    options = DecodeOptions(SamplingParams(0.8, seed=5), 40)
    expected = answer_of(runner, prompt, options).tokens
    again = TorchRunner(build(family, NAME))  # of its own: `fusion` drafts while the target runs
    resources = Resources(EAGER, vocabulary=97, model=DraftRunner(again, 97).session)
    drafters: list[Drafter] = [Oracle(expected, 6, 4), Chaos(97), make("fusion", resources), make("draft", resources)]
    for drafter in drafters:
        drafted = answer_of(runner, prompt, options, drafter)
        assert drafted.tokens == expected
    assert len(drafted.steps) < len(expected)


@pytest.fixture
def few_tokens_between_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "SNAPSHOT_TOKENS", 8)


@pytest.mark.usefixtures("few_tokens_between_snapshots")
@pytest.mark.parametrize("family", ALL)
def test_sessions_are_reused_forked_and_rewound_at_random_points(family: str) -> None:
    for _ in check_sessions(runner_of(family), 3, share=0.3, added=(1, 3, 100), tokens=20):
        pass


@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
def test_loading_gives_the_bits_of_quantising_the_loaded_model(tmp_path: Path) -> None:
    """transformers initialises what a checkpoint lacks, which must not be the layers around replaced ones."""
    build(FAST, "eager").save_pretrained(tmp_path)
    model = build(FAST, NAME)
    quantize_model(model, Quantization("int8"), Placement(model, [torch.device("cpu")]))
    plain = TorchRunner(model)
    loaded = load_weights(LoadOptions(str(tmp_path), device="cpu", backend="torch", quantization=Quantization("int8")))
    expected, found = (each.forward(each.new_cache(), ForwardBatch.chain(text_of(20))) for each in (plain, loaded))
    assert torch.equal(found, expected)


def test_a_layer_whose_weights_are_read_by_another_is_refused() -> None:
    """Its replacement has none to read."""
    model = build("stablelm", NAME)
    layer = model.model.layers[0].mlp
    layer.forward = lambda rows: torch.nn.functional.linear(rows, layer.up_proj.weight.clamp(-1, 1)[:32])
    quantize_model(model, Quantization("int8"), Placement(model, [torch.device("cpu")]))
    with pytest.raises(ModelError, match="its forward fails"):
        TorchRunner(model)


@pytest.mark.parametrize("family", ["gemma4", "mamba2"])
def test_a_gpu_is_refused_in_a_sentence(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    with pytest.raises(ModelError, match=r"differ in shape, or without attention, are served on a CPU only; set model\.device"):
        TorchRunner(build(family, NAME))


def test_states_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Far from the end, snapshots are kept at larger distances, and never more than the limit."""
    monkeypatch.setattr(states, "SNAPSHOT_BYTES", 0)
    runner = runner_of("qwen3_5")
    shape = runner.cache_shape.recurrent
    assert shape is not None and shape.snapshots == 2
    empty = torch.empty(0)
    kept: list[states.Snapshot] = []
    for length in range(256, 256 * 65, 256):
        kept.append(states.Snapshot(length, empty, empty))
        states.thin(kept, 8)
    gaps = np.diff([0, *(each.length for each in kept)])
    assert len(kept) == 8 and kept[-1].length == 256 * 64
    assert gaps[-1] == 256 and gaps[0] >= 2048


HEADS, KEY, VALUE, ROWS = 3, 5, 4, 24


def random_ancestors(rows: int, seed: int) -> torch.Tensor:
    """bool [rows, rows] of a random tree; parents precede children."""
    generator = torch.Generator().manual_seed(seed)
    ancestors = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        parent = int(torch.randint(max(0, row - 5), row, (1,), generator=generator))
        ancestors[row] |= ancestors[parent]
    return ancestors


class Rows:
    """Random inputs of all rows, float64."""

    def __init__(self, decay_dim: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.queries, self.keys = (torch.nn.functional.normalize(normal(HEADS, ROWS, KEY), dim=-1) for _ in range(2))
        self.values, self.state = normal(HEADS, ROWS, VALUE), normal(HEADS, KEY, VALUE)
        self.beta = torch.rand(HEADS, ROWS, generator=generator, dtype=torch.float64)
        self.g = -normal(HEADS, ROWS, decay_dim).abs() * 3

    def recur(self, path: list[int], delta: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """The state after the path and what its last row reads, row by row."""
        state = self.state
        for row in path:
            state = state * self.g[:, row].exp()[:, :, None]
            write = self.values[:, row]
            if delta:
                write = self.beta[:, row, None] * (write - torch.einsum("hk,hkv->hv", self.keys[:, row], state))
            state = state + self.keys[:, row, :, None] * write[:, None]
        return state, torch.einsum("hk,hkv->hv", self.queries[:, path[-1]], state)


def scan_all(rows: Rows, ancestors: torch.Tensor, delta: bool, parts: list[tuple[int, int]]) -> list[torch.Tensor]:
    """u and outputs of all rows, computed in these parts."""
    writes, outputs = rows.values[:, :0], rows.values[:, :0]
    for first, end in parts:
        mask = torch.zeros(end - first, end, dtype=torch.float64).masked_fill(~ancestors[first:end, :end], -torch.inf)
        beta = rows.beta[:, first:end] if delta else None
        own = rows.queries[:, first:end], rows.keys[:, :end], rows.values[:, first:end], beta
        found, read = scan(*own, writes, rows.g[:, :end], rows.state, ancestors[:end, :end].double(), mask)
        writes, outputs = torch.cat([writes, found], 1), torch.cat([outputs, read], 1)
    return [writes, outputs]


@pytest.mark.parametrize("decay_dim", [1, KEY])
@pytest.mark.parametrize("delta", [True, False])
@pytest.mark.parametrize("known", [0, 1, 7])
def test_trees_equal_their_paths(decay_dim: int, delta: bool, known: int) -> None:
    """In one call and in two, as a draft model expands its tree."""
    rows, ancestors = Rows(decay_dim, known), random_ancestors(ROWS, known)
    parts = [(first, end) for first, end in ((0, known), (known, ROWS)) if first < end]
    writes, outputs = scan_all(rows, ancestors, delta, parts)
    for row in range(ROWS):
        path = ancestors[row].nonzero()[:, 0].tolist()
        state, output = rows.recur(path, delta)
        assert torch.allclose(outputs[:, row], output, atol=1e-12, rtol=0)
        committed = rows.state.clone()
        advance(committed, rows.keys[:, path], writes[:, path], rows.g[:, path])
        assert torch.allclose(committed, state, atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("known", [0, 1, 7])
def test_convolutions_of_trees_equal_those_of_their_paths(window: int, known: int) -> None:
    generator = torch.Generator().manual_seed(window)
    inputs, weight = (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for rows in (window + ROWS, window + 1))
    bias, ancestors = torch.randn(6, generator=generator, dtype=torch.float64), random_ancestors(ROWS, known)
    found = convolve(inputs, gather_index(ancestors, known, window), weight, bias)
    for row in range(known, ROWS):
        path = [*range(window), *(ancestors[row].nonzero()[:, 0] + window).tolist()]
        last = (inputs[path][-window - 1 :] * weight).sum(0) + bias
        assert torch.allclose(found[row - known], last, atol=1e-12)
