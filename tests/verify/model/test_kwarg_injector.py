"""Arguments reach layers of models that do not pass them on, and only inside the context."""

from __future__ import annotations

import pytest
import torch

from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.kwarg_injector import NotPassedOn
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.model.families import build


def test_a_model_that_passes_nothing_on_is_served() -> None:
    model = build("stablelm", NAME)
    with pytest.raises(NotPassedOn, match="to its attention layers"):
        model(torch.tensor([[5]]), attention=1)
    runner = TorchRunner(model)
    assert runner.forward(runner.new_cache(), ForwardBatch.chain(torch.tensor([5, 6]))).shape == (2, 97)
