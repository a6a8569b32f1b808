"""Training of the head: it learns the target's next token, resumes, and writes a checkpoint that the server loads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.verify.heads.loading import load_head
from outrider.verify.heads.networks import EagleHead
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.loading import load_weights
from training import train_head
from training.train import RunState, build_model
from training.train_head import HeadLearner, export, head_config, train

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def learner() -> HeadLearner:
    torch.manual_seed(0)
    target = build_model(SHAPE)
    return HeadLearner(target, head_config(target.config))


def test_steps_lower_the_loss_of_every_pass() -> None:
    tokens = torch.arange(66).reshape(2, 33)
    model = learner()
    losses = [model.step(tokens, 1.0) for _ in range(5)]
    assert len(losses[0]) == train_head.PASSES
    assert all(after < before for before, after in zip(losses[0], losses[-1], strict=True))


def test_a_pass_reads_the_states_of_the_pass_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = learner()
    seen = []

    def repeat(embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        seen.append((embedded, states, positions))
        return states

    monkeypatch.setattr(model.model, "advance", repeat)
    model.losses(torch.arange(12).reshape(1, 12))
    (first, states, positions), (second, own, later) = seen[:2]
    assert torch.equal(own, states[:, :-1])
    assert torch.equal(second, first[:, 1:])
    assert positions[0, 0] == 1 and later[0, 0] == 2


def test_a_run_resumes_and_its_head_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_head, "BATCH_TOKENS", 64)
    monkeypatch.setattr(train_head, "SHORT_WINDOW_TOKENS", 32)
    ids = (np.arange(1000) % 90).astype(np.uint16)
    first = learner()
    done = train(first, ids, 0.001, tmp_path / "head.pt")
    assert done.step >= 1
    assert train(learner(), ids, 0.001, tmp_path / "head.pt").tokens == done.tokens
    first.target.save_pretrained(tmp_path / "target")
    export(first, tmp_path / "eagle", RunState(losses=[(64, 8.0, 8.5)]))
    target = load_weights(LoadOptions(str(tmp_path / "target"), dtype="float32", device="cpu"))
    found = load_head(str(tmp_path / "eagle"), target, pack=False)
    assert found is not None and isinstance(found.head, EagleHead)
    assert torch.allclose(found.head.fc.weight, first.model.fc.weight, atol=1e-2)
