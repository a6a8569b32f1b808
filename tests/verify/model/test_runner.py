"""The runner of transformers' models: streams in one forward, hidden states, and what its self-checks find, save and refuse."""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import MAX_NODES, Ints
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookupOptions
from outrider.verify.decode import decode
from outrider.verify.errors import ModelError
from outrider.verify.model import invariance
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch, Segment, grouped
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.gpu.text_work import INVARIANT_ROWS
from outrider.verify.model.hidden_states import StateRing
from outrider.verify.model.invariance import Tree, start
from outrider.verify.model.kwarg_injector import NotPassedOn
from outrider.verify.model.loading import prepare
from outrider.verify.model.self_check import check_model
from outrider.verify.model.sizes import weight_size
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.slow import mostly_slow
from tests.verify.draft_model.test_draft_model import PROMPT
from tests.verify.model.families import ATTENDING, build, config_of


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_leave_out_the_embedding_table_unless_it_is_the_head(tiny_config: LlamaConfig, tied: bool) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**tiny_config.to_dict(), "tie_word_embeddings": tied}))
    layers = sum(parameter.nbytes for parameter in model.model.layers.parameters()) + model.model.norm.weight.nbytes
    assert weight_size(model) == (layers + 97 * 32 * 4, layers // 4 + 97 * 32)


STREAMS = ((3, 4), (0, 1), (70, 9), (20, 30))  # tokens of text and rows of each stream


def test_streams_share_a_forward(tiny_config: LlamaConfig) -> None:
    runner = TorchRunner(LlamaForCausalLM(tiny_config), pack=True, started=False)
    runner.start(200)
    for joint in (STREAMS[:2], STREAMS, STREAMS[::-1]):
        segments, expected = [], []
        for text, count in joint:
            cache = runner.new_cache()
            cache.tensor.normal_(generator=torch.Generator().manual_seed(text))
            cache.length = text
            batch = ForwardBatch.chain(range(5, 5 + count))
            expected.append((runner.forward(cache, batch).clone(), cache.tensor.clone()))
            cache.tensor[:, :, :, text : text + count] = 0
            segments.append(Segment(cache, batch))
        found = runner.forward_all(segments)
        for logits, segment, (alone, written) in zip(found, segments, expected, strict=True):
            end = segment.cache.length + segment.rows
            assert torch.allclose(logits, alone, atol=1e-4)
            assert torch.allclose(segment.cache.tensor[:, :, :, :end], written[:, :, :, :end], atol=1e-5)


def test_a_model_that_passes_nothing_on_is_served() -> None:
    model = build("stablelm", NAME)
    with pytest.raises(NotPassedOn, match="to its attention layers"):
        model(torch.tensor([[5]]), attention=1)
    runner = TorchRunner(model)
    assert runner.forward(runner.new_cache(), ForwardBatch.chain(torch.tensor([5, 6]))).shape == (2, 97)


def test_streams_are_computed_together_up_to_the_limits(tiny_runner: TorchRunner) -> None:
    segments = [Segment(tiny_runner.new_cache(), ForwardBatch.chain(range(rows))) for rows in (30, 20, 5, 1)]
    for limits, sizes in (((1024,), [4]), ((40,), [1, 3]), ((1024, 3), [3, 1]), ((10,), [1, 1, 2])):
        groups = grouped(segments, *limits)
        assert [each for group in groups for each in group] == segments
        assert [len(group) for group in groups] == sizes


@pytest.mark.parametrize("layers", [(), (0, 1)], ids=str)
def test_the_states_of_committed_tokens_are_kept(tiny_config: LlamaConfig, layers: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    runner = TorchRunner(LlamaForCausalLM(tiny_config), started=False)
    runner.tap_hidden(layers)
    runner.start(128)
    verifier = Verifier(runner, runner.new_cache())
    repeated: Ints = np.tile(PROMPT, 3)
    options = DecodeOptions(SamplingParams(temperature=0), 20, max_nodes=12)
    text = [*repeated.tolist(), *decode(verifier, LookupDrafter(LookupOptions()), repeated, options).tokens]
    hidden = verifier.cache.hidden
    assert hidden is not None and (hidden.first, hidden.end) == (0, len(text) - 1)
    plain = LlamaForCausalLM(LlamaConfig(**tiny_config.to_dict()))
    plain.load_state_dict(runner.model.state_dict())
    with torch.no_grad():
        expected = plain.model(torch.tensor([text[:-1]]), output_hidden_states=True)
    states = [expected.hidden_states[layer] for layer in layers] or [expected.last_hidden_state]
    assert torch.allclose(hidden.read(0, len(text) - 1), torch.cat(states, -1)[0], atol=1e-4)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=8))
def test_kept_states_are_those_written_last(steps: list[tuple[int, int, int]]) -> None:
    ring = StateRing(7, 1, torch.float32, torch.device("cpu"))
    for begin, count, length in steps:
        ring.write(begin, torch.arange(begin + 1, begin + count + 1, dtype=torch.float32)[:, None])
        assert ring.end == begin + count and ring.end - ring.first <= 7
        ring.truncate(length)
        found = ring.read(-1, 45)[:, 0].tolist()
        assert found == [at + 1 if ring.first <= at < ring.end else 0 for at in range(-1, 45)]


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TWO_PIECES = r"'broken' reads a prompt differently in two pieces than in one: one of its layers probably keeps a state"
TREE = "'broken' reads a draft tree differently than the tree's paths"


class Recorder(TorchRunner):
    """Records the forwards; `noisy` of them, from the first on, have one wrong row."""

    rows: list[int]
    noisy = 0

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> Any:
        self.rows.append(len(batch))
        found = super().forward(cache, batch, logits)
        if len(self.rows) <= self.noisy:
            found = found.clone()
            found[-1] = found[-1].flip(0)
        return found


class VisibleSiblings(TorchRunner):
    """Every row of a tree attends to all rows before it."""

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> Any:
        return super().forward(cache, ForwardBatch(batch.tokens, batch.depths, None, batch.known), logits)


def keep_state(model: LlamaForCausalLM) -> None:
    """The second layer adds twice what it computed for the last row of the forward before."""
    state: list[torch.Tensor] = []

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        before = state.pop() if state else torch.zeros_like(output[:, -1:])
        state.append(output[:, -1:])
        return output + 2 * before

    model.model.layers[1].mlp.register_forward_hook(hook)


def mix_rows(model: LlamaForCausalLM) -> None:
    """The last layer adds to each row what it computed for the row before, as a convolution does."""

    def hook(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    model.model.layers[-1].mlp.register_forward_hook(hook)


def with_positions(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[LlamaForCausalLM], None]:
    def sabotage(model: LlamaForCausalLM) -> None:
        def hook(module: torch.nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            positions = kwargs["position_ids"]
            return inputs, kwargs if positions is None else {**kwargs, "position_ids": change(positions)}

        model.register_forward_pre_hook(hook, with_kwargs=True)

    return sabotage


# Positions start at 0 in every forward, or count its rows as if they were consecutive tokens.
start_at_zero = with_positions(lambda positions: positions - positions[0, 0])
count_rows = with_positions(lambda positions: positions[:, :1] + torch.arange(positions.shape[1]))


@pytest.fixture(params=DTYPES, ids=str)
def llama(request: pytest.FixtureRequest, tiny_config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config).to(request.param)


@pytest.mark.parametrize("name", ATTENDING)
def test_supported_models_pass(name: str) -> None:
    model = build(name, NAME).to(torch.bfloat16)
    prepare(model, None)
    check_model(TorchRunner(model), name)


@pytest.mark.parametrize(
    ("sabotage", "message"), [(keep_state, TWO_PIECES), (mix_rows, TWO_PIECES), (start_at_zero, TWO_PIECES), (count_rows, TREE)]
)
def test_a_broken_model_is_refused(sabotage: Any, message: str, llama: LlamaForCausalLM) -> None:
    sabotage(llama)
    with pytest.raises(ModelError, match=message):
        check_model(TorchRunner(llama), "broken")


def test_rows_that_attend_to_siblings_are_found(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match=TREE):
        check_model(VisibleSiblings(llama), "broken")


def test_a_model_that_computes_nan_is_refused(llama: LlamaForCausalLM) -> None:
    with torch.no_grad():
        llama.model.norm.weight[3] = torch.nan
    with pytest.raises(ModelError, match=f"computes NaN in {str(llama.dtype)[6:]}; set another dtype"):
        check_model(TorchRunner(llama), "broken")


def test_rows_that_differ_in_some_texts_only_are_forgiven(tiny_runner: TorchRunner) -> None:
    """A mixture of experts behaves like this, because rounding can change the experts of a row."""
    runner = Recorder(tiny_runner.model)
    runner.rows, runner.noisy = [], 13
    check_model(runner, "tiny")
    assert len(runner.rows) == 20


def deep_llama(dtype: torch.dtype, outliers: bool) -> LlamaForCausalLM:
    """A random Llama of 16 layers. With `outliers`, one weight in a thousand is multiplied by 30, which amplifies rounding."""
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 16}
    torch.manual_seed(1)
    model: LlamaForCausalLM = LlamaForCausalLM(config_of("llama", NAME, initializer_range=0.2, **sizes))
    with torch.no_grad():
        for values in model.parameters() if outliers else ():
            values.view(-1)[torch.randperm(values.numel())[: max(1, values.numel() // 1000)]] *= 30
    prepare(model, None)
    return model.to(dtype)


@pytest.mark.parametrize("outliers", [False, True], ids=["even", "outliers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_that_amplifies_rounding_passes(dtype: torch.dtype, outliers: bool) -> None:
    check_model(TorchRunner(deep_llama(dtype, outliers)), "deep")


@pytest.mark.parametrize(
    ("dtype", "outliers"), mostly_slow([(torch.bfloat16, False), (torch.float32, True)], (torch.float32, True))
)
@pytest.mark.parametrize(("sabotage", "message"), [(keep_state, TWO_PIECES), (start_at_zero, TWO_PIECES), (count_rows, TREE)])
def test_a_deep_model_with_a_fault_is_refused(sabotage: Any, message: str, dtype: torch.dtype, outliers: bool) -> None:
    """Outliers are left out in bfloat16: such a model amplifies the rounding of one bit until it hides every fault."""
    model = deep_llama(dtype, outliers)
    sabotage(model)
    with pytest.raises(ModelError, match=message):
        check_model(TorchRunner(model), "broken")


CONTEXT = 512


@pytest.fixture
def runner(tiny_config: LlamaConfig) -> TorchRunner:
    config = copy.deepcopy(tiny_config)
    config.max_position_embeddings = CONTEXT
    return TorchRunner(LlamaForCausalLM(config), CONTEXT, pack=True, started=False)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Runners are as on a GPU, but start without kernels; returns whether each start has invariant rows."""
    found: list[bool] = []

    def begin(self: TorchRunner, context_tokens: int, invariant_rows: Sequence[int] = ()) -> None:
        self.context_tokens, self.is_invariant = context_tokens, bool(invariant_rows)
        found.append(self.is_invariant)

    monkeypatch.setattr(TorchRunner, "start", begin)
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    return found


def test_on_a_cpu_only_the_library_has_invariant_rows(runner: TorchRunner) -> None:
    start(runner, CONTEXT, "auto", None)
    assert runner.invariance == "off"
    with pytest.raises(ModelError, match=r"set model\.invariant to auto, or serve a model of a family"):
        start(runner, CONTEXT, "on", None)


@pytest.mark.parametrize("holds", [True, False])
def test_rows_are_invariant_where_the_kernels_can(
    runner: TorchRunner, starts: list[bool], holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invariance, "holds", lambda *_: holds)
    start(runner, CONTEXT, "auto", None)
    assert starts == ([True] if holds else [True, False])
    assert runner.invariance == ("on" if holds else "impossible with this machine's kernels")
    assert runner.draft_depth(60) == (3 if holds else MAX_NODES)
    start(runner, CONTEXT, "off", None)
    assert (runner.invariance, starts[-1]) == ("off", False)
    if not holds:
        with pytest.raises(ModelError, match="depend on the draft's size"):
            start(runner, CONTEXT, "on", None)


@pytest.mark.usefixtures("starts")
def test_a_finding_is_saved_and_a_damaged_file_is_replaced(
    runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, compared = tmp_path / "new" / "rows.json", list[int]()

    def holds(_: TorchRunner, trees: Sequence[Tree]) -> bool:
        compared.append(len(trees))
        return True

    monkeypatch.setattr(invariance, "holds", holds)
    of_other_code = json.dumps({"version": invariance.VERSION - 1, "holds": True})
    for damage in (None, None, of_other_code, json.dumps({"version": invariance.VERSION}), "[", "[]"):
        if damage:
            file.write_text(damage)
        start(runner, CONTEXT, "on", file)
    assert compared == [len(invariance.TREES), 1, *[len(invariance.TREES)] * 4]


def test_rows_that_are_not_invariant_any_more_are_not_tried_again(
    runner: TorchRunner, starts: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "rows.json"
    for holds in (True, False, True):
        monkeypatch.setattr(invariance, "holds", lambda *_, holds=holds: holds)
        start(runner, CONTEXT, "auto", file)
    assert starts == [True, True, False, False]


def test_compared_trees_and_their_paths_have_every_number_of_rows_of_graphs() -> None:
    rows = {tree.nodes + 1 + tree.beside for tree in invariance.TREES} | {1, 1 + invariance.TREES[0].beside}
    assert {next(count for count in INVARIANT_ROWS if count >= each) for each in rows} == {*INVARIANT_ROWS}
