"""Training: the schedule, the batches, a learning step, and checkpoints that resume exactly."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training import train
from training.train import BATCH_TOKENS, Learner, RunState, batch, bits_per_byte, build_model, rate_at, resume, save

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def learner() -> Learner:
    torch.manual_seed(0)
    return Learner(SHAPE, "cpu", compiled=False)


def test_the_rate_warms_up_and_ends_at_zero() -> None:
    assert [rate_at(share) for share in (0.0, 0.005, 0.25, 0.5, 0.75, 1.0)] == [0.0, 0.5, 1.0, 1.0, 0.5, 0.0]


def test_batches_read_the_text_in_order_and_wrap_around() -> None:
    ids = np.arange(20_000, dtype=np.uint16)
    first = batch(ids, RunState(), 512)
    assert first.shape == (BATCH_TOKENS // 512, 513)
    assert first.dtype == torch.int64
    assert first[1, 0] == 512
    assert batch(ids, RunState(tokens=BATCH_TOKENS), 512)[0, 0] == BATCH_TOKENS
    assert int(batch(ids, RunState(tokens=10 * BATCH_TOKENS), 512).max()) < len(ids)


def test_steps_lower_the_loss() -> None:
    tokens = torch.arange(66).reshape(2, 33)
    model = learner()
    losses = [model.step(tokens, 1.0) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    tokens = torch.arange(66).reshape(2, 33)
    first, second = learner(), learner()
    assert resume(tmp_path / "checkpoint.pt", (first,)) == RunState()
    first.step(tokens, 1.0)
    state = RunState(step=1, tokens=64, seconds=0.5, losses=[(64, 8.0, 8.5)])
    save(tmp_path / "checkpoint.pt", (first,), state)
    assert resume(tmp_path / "checkpoint.pt", (second,)).step == 1
    assert first.step(tokens, 1.0) == second.step(tokens, 1.0)


def test_training_stops_at_the_time_limit_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 64)
    monkeypatch.setattr(train, "SHORT_WINDOW_TOKENS", 32)
    monkeypatch.setattr(train, "CONTEXT_TOKENS", 32)
    learners = (learner(), learner())
    ids = np.arange(1000, dtype=np.uint16)
    done = train.train(learners, ids, 0.001, tmp_path / "checkpoint.pt")
    assert done.step >= 1
    assert done.seconds >= 0.06
    assert train.train(learners, ids, 0.001, tmp_path / "checkpoint.pt").tokens == done.tokens


def test_a_uniform_model_takes_twelve_bits_per_token() -> None:
    model = build_model(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bits = bits_per_byte(model, np.arange(101, dtype=np.uint16), 100, "cpu")
    assert bits == pytest.approx(12.0, abs=1e-3)  # 4096 tokens, one byte each
