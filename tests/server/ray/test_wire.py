"""Calls and batches survive their encoding, and errors keep their type and what the client needs."""

from __future__ import annotations

import pytest

from outrider.server.engine.engine import DeadlineExceeded, EngineError, InvalidRequest, Overloaded, WorkerLost
from outrider.server.engine.messages import Request, TokenEvent
from outrider.server.ray import wire
from outrider.verify.sampling_params import SamplingParams

EVENT = TokenEvent("a", [1, 2], "text")


def test_a_call_arrives_as_it_was_sent() -> None:
    call = wire.Call(Request("a", [1, 2], SamplingParams(seed=3), 5, session="s", affinity="x"), 0.5, True)
    assert wire.decode_call(wire.encode(call)) == call


@pytest.mark.parametrize("kind", [EngineError, InvalidRequest, WorkerLost, DeadlineExceeded])
def test_an_error_keeps_its_type_and_message(kind: type[EngineError]) -> None:
    event, error = wire.decode_batch(wire.encode_batch([EVENT, kind("why")]))
    assert (event, type(error), str(error)) == (EVENT, kind, "why")


def test_an_overload_says_when_to_retry() -> None:
    (error,) = wire.decode_batch(wire.encode_batch([Overloaded("full", "tokens", 2.5)]))
    assert isinstance(error, Overloaded)
    assert (str(error), error.reason, error.seconds) == ("full", "tokens", 2.5)
