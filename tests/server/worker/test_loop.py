"""The loop serves requests in turn; a failed step ends one request; a lost device ends the worker."""

from __future__ import annotations

import socket
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.engine import messages
from server.engine.messages import Cancel, Failed, FromWorker, Request, Shutdown, Status, TokenEvent, ToWorker
from server.engine.transport import WorkerSide, framed
from server.settings import load_settings
from server.worker.loop import Worker
from tests.server.worker.fakes import tiny_runtime
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams


def failing(error: Exception) -> tuple[Worker, Any, list[object]]:
    """A worker with one request whose step fails, and the messages it sends."""
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


def test_a_failed_step_ends_only_its_request() -> None:
    worker, job, sent = failing(RuntimeError("shapes"))
    worker._step(job)
    assert [message.id for message in sent if isinstance(message, Failed)] == ["a"]
    assert not worker._active
    assert not job.session.drafters  # their state is unknown


def test_a_lost_device_ends_the_worker() -> None:
    worker, job, _ = failing(torch.AcceleratorError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(torch.AcceleratorError):
        worker._step(job)


def served(runner: ModelRunner, *sent: ToWorker) -> list[FromWorker]:
    """The messages that a worker with two slots sends in response, up to the first token of the last request.

    All messages arrive before the first step; the front end then closes the socket.
    """
    settings = load_settings(None, {"speculation.drafter": "none", "scheduling.max_active": 2})
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"".join(framed(messages.encode(message)) for message in sent))
        ours.shutdown(socket.SHUT_WR)
        worker = Worker(settings, tiny_runtime(runner, settings), WorkerSide(theirs))
        assert worker._receive() == (not any(isinstance(message, Shutdown) for message in sent))
        for _ in range(100):
            worker._admit()
            if worker._active:
                worker._step(worker._active[0])
                worker._active.rotate(-1)
        return [messages.decode_from_worker(data) for data in WorkerSide(ours).receive(0.01)]


def request(id: str, **fields: Any) -> Request:
    return Request(**{"id": id, "prompt": [1, 2, 3], "params": SamplingParams(temperature=0), "max_tokens": 4, **fields})


def test_active_requests_take_turns(tiny_runner: ModelRunner) -> None:
    found = served(tiny_runner, request("a"), request("b"), request("c"))
    events = [message for message in found if isinstance(message, TokenEvent)]
    assert {id: sum(len(event.tokens) for event in events if event.id == id) for id in "abc"} == {"a": 4, "b": 4, "c": 4}
    order = [event.id for event in events]
    assert order[:4] == ["a", "b", "a", "b"] and order.index("c") > 4
    assert any(isinstance(message, Status) for message in found)


def test_requests_of_one_session_wait_for_each_other(tiny_runner: ModelRunner) -> None:
    found = served(tiny_runner, *(request(id, session="s") for id in "ab"), request("c", session="s", principal="other"))
    events = [message for message in found if isinstance(message, TokenEvent)]
    order = [event.id for event in events]
    assert order.index("c") < order.index("b")  # sessions belong to their principal
    assert max(i for i, id in enumerate(order) if id == "a") < order.index("b")
    assert next(event for event in events if event.id == "b").cached_tokens == 2
    assert next(event for event in events if event.id == "c").cached_tokens == 0


def test_a_cancelled_request_is_removed(tiny_runner: ModelRunner) -> None:
    found = served(tiny_runner, request("a"), request("b"), Cancel("a"), Cancel("unknown"))
    assert {message.id for message in found if isinstance(message, TokenEvent)} == {"b"}


def test_an_invalid_request_fails_alone(tiny_runner: ModelRunner) -> None:
    found = served(tiny_runner, request("a", prompt=[]), request("b"))
    [failed] = [message for message in found if isinstance(message, Failed)]
    assert (failed.id, failed.client_error) == ("a", True)
    assert {message.id for message in found if isinstance(message, TokenEvent)} == {"b"}


def test_a_shutdown_ends_the_loop(tiny_runner: ModelRunner) -> None:
    assert served(tiny_runner, Shutdown()) == []
