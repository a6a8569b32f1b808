"""What a failure in a step takes with it: one request, or, where the device is gone, the worker."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.engine.messages import Failed
from server.worker.loop import Worker


def failing(error: Exception) -> tuple[Worker, Any, list[object]]:
    """A worker with one request whose step fails, and what it sends."""
    worker: Any = Worker.__new__(Worker)
    sent: list[object] = []

    def step() -> None:
        raise error

    verifier = SimpleNamespace(truncate=lambda length: None)
    session = SimpleNamespace(verifier=verifier, drafters={"none": object()})
    job = SimpleNamespace(request=SimpleNamespace(id="a"), session=session, step=step, close=lambda: None)
    worker._active = deque([job])
    worker._sessions = SimpleNamespace(release=lambda session: None, usage_ratio=0.0, __len__=lambda: 0)
    worker._report = lambda: None
    worker._send = sent.append
    return worker, job, sent


def test_a_failed_step_ends_its_request_alone() -> None:
    worker, job, sent = failing(RuntimeError("shapes"))
    worker._step(job)
    assert [message.id for message in sent if isinstance(message, Failed)] == ["a"]
    assert not worker._active
    assert not job.session.drafters  # whatever state they are in


def test_a_lost_device_ends_the_worker() -> None:
    worker, job, _ = failing(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError):
        worker._step(job)
