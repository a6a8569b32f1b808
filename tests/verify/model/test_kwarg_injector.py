"""Arguments reach layers of models that do not pass them on, and only inside the context."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.kwarg_injector import KwargInjector, NotPassedOn
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build


def test_arguments_are_added_inside_the_context() -> None:
    layer, seen = torch.nn.Identity(), []
    injector = KwargInjector([layer])
    layer.forward = lambda rows, **others: seen.append((rows, others))  # type: ignore[method-assign, assignment]
    with injector.inject({"attention": 1}, torch.tensor([5])) as handed:
        layer(2, other=3)
    layer(4)
    assert seen == [(2, {"attention": 1, "positions": torch.tensor([5]), "other": 3}), (4, {})] and handed == {}


def test_without_hooks_the_models_call_gets_the_arguments() -> None:
    with KwargInjector().inject({"attention": 1}, torch.tensor([5])) as handed:
        assert handed == {"attention": 1}


def test_a_model_that_passes_nothing_on_is_served() -> None:
    model = build("stablelm", NAME)
    with pytest.raises(NotPassedOn, match="to its attention layers"):
        model(torch.tensor([[5]]), attention=1)
    runner = TorchRunner(model)
    assert runner.forward(runner.new_cache(), ForwardBatch.chain(torch.tensor([5, 6]))).shape == (2, 97)
