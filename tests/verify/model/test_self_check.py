"""The self-check: every supported model passes in every dtype, and a model that breaks the rules is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.verify.model.test_architectures import ARCHITECTURES, make
from verify.errors import ModelError
from verify.model.attention import NAME
from verify.model.batch import ForwardBatch
from verify.model.cache.kv_cache import KVCache
from verify.model.loading import prepare
from verify.model.runner import ModelRunner
from verify.model.self_check import check_model, difference, draft_tree, random_text

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TWO_PIECES = r"'broken' reads a prompt differently in two pieces than in one: one of its layers probably keeps a state"
TREE = "'broken' reads a draft tree differently than the tree's paths"


class Recorder(ModelRunner):
    """Records the forwards; `noisy` of them, from the first on, have one wrong row."""

    rows: list[int]
    noisy = 0

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> torch.Tensor:
        self.rows.append(len(batch))
        found = super().forward(cache, batch, logits)
        if len(self.rows) <= self.noisy:
            found = found.clone()
            found[-1] = found[-1].flip(0)
        return found


class VisibleSiblings(ModelRunner):
    """Every row of a tree attends to all rows before it."""

    def forward(self, cache: KVCache, batch: ForwardBatch, logits: bool = True) -> torch.Tensor:
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


def start_at_zero(model: LlamaForCausalLM) -> None:
    """Positions start at 0 in every forward."""

    def hook(module: torch.nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if (positions := kwargs["position_ids"]) is None:
            return inputs, kwargs
        return inputs, {**kwargs, "position_ids": positions - positions[0, 0]}

    model.register_forward_pre_hook(hook, with_kwargs=True)


def count_rows(model: LlamaForCausalLM) -> None:
    """Positions count the rows of a forward, as if they were consecutive tokens."""

    def hook(module: torch.nn.Module, inputs: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if (positions := kwargs["position_ids"]) is None:
            return inputs, kwargs
        return inputs, {**kwargs, "position_ids": positions[:, :1] + torch.arange(positions.shape[1])}

    model.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.fixture(params=DTYPES, ids=str)
def llama(request: pytest.FixtureRequest, tiny_config: LlamaConfig) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config).to(request.param)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_supported_models_pass(name: str, dtype: torch.dtype) -> None:
    model = make(name, NAME).to(dtype)
    prepare(model, None)
    check_model(ModelRunner(model), name)


@pytest.mark.parametrize(
    ("sabotage", "message"),
    [(keep_state, TWO_PIECES), (mix_rows, TWO_PIECES), (start_at_zero, TWO_PIECES), (count_rows, TREE)],
)
def test_a_broken_model_is_refused(sabotage: Any, message: str, llama: LlamaForCausalLM) -> None:
    sabotage(llama)
    with pytest.raises(ModelError, match=message):
        check_model(ModelRunner(llama), "broken")


def test_rows_that_attend_to_siblings_are_found(llama: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match=TREE):
        check_model(VisibleSiblings(llama), "broken")


def test_a_model_that_computes_nan_is_refused(llama: LlamaForCausalLM) -> None:
    with torch.no_grad():
        llama.model.norm.weight[3] = torch.nan
    with pytest.raises(ModelError, match=f"computes NaN in {str(llama.dtype)[6:]}; set another dtype"):
        check_model(ModelRunner(llama), "broken")


def test_a_check_is_five_short_forwards(tiny_runner: ModelRunner) -> None:
    runner = Recorder(tiny_runner.model)
    runner.rows = []
    check_model(runner, "tiny")
    assert len(runner.rows) == 5
    assert max(runner.rows) <= 16  # the shortest context that can be set


def test_rows_that_differ_in_some_texts_only_are_forgiven(tiny_runner: ModelRunner) -> None:
    """As in a mixture of experts, where rounding changes the experts of a row."""
    runner = Recorder(tiny_runner.model)
    runner.rows, runner.noisy = [], 13
    check_model(runner, "tiny")
    assert len(runner.rows) == 20


def test_the_difference_is_relative_and_ignores_masked_tokens() -> None:
    logits = torch.randn(3, 101, generator=torch.Generator().manual_seed(0))
    logits[:, :20] = -torch.inf
    scaled = difference(logits * 8 + 8 * 0.01, logits * 8)
    assert torch.allclose(scaled, difference(logits + 0.01, logits), rtol=0.01)
    assert (scaled > 0.005).all()
    assert (difference(torch.zeros(2, 5), torch.zeros(2, 5)) == 0).all()  # all logits equal


@pytest.mark.parametrize("vocabulary", [1, 2, 97, 32000])
def test_tokens_are_ordinary_and_the_same_each_time(vocabulary: int) -> None:
    prefix, root, nodes = random_text(vocabulary, seed=1)
    assert (prefix, root, nodes) == random_text(vocabulary, seed=1)
    assert all(vocabulary // 4 <= token <= vocabulary * 3 // 4 < vocabulary for token in (*prefix, root, *nodes))


def test_the_draft_tree_has_two_paths_of_its_depth() -> None:
    tree = draft_tree(list(range(10, 18)))
    assert tree.path(4) == [10, 11, 12, 13, 14]
    assert tree.path(7) == [10, 11, 15, 16, 17]
    assert tree.depths.tolist() == [len(tree.path(row)) for row in range(8)]
