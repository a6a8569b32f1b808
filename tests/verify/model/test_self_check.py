"""The self-check: every supported model passes in every dtype, and a model that breaks the rules is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.loading import prepare
from outrider.verify.model.self_check import check_model
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import ATTENDING, build, config_of

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


@pytest.mark.parametrize(("dtype", "outliers"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize(("sabotage", "message"), [(keep_state, TWO_PIECES), (start_at_zero, TWO_PIECES), (count_rows, TREE)])
def test_a_deep_model_with_a_fault_is_refused(sabotage: Any, message: str, dtype: torch.dtype, outliers: bool) -> None:
    """Outliers are left out in bfloat16: such a model amplifies the rounding of one bit until it hides every fault."""
    model = deep_llama(dtype, outliers)
    sabotage(model)
    with pytest.raises(ModelError, match=message):
        check_model(TorchRunner(model), "broken")
