"""Messages between ingress and replicas through Ray: bytes of msgpack, so that no message can hold code.

A call is one request. Its answer is a stream of batches: events, and at most one error at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from outrider.server.engine.engine import (
    DeadlineExceeded,
    EngineError,
    InvalidRequest,
    Overloaded,
    ShuttingDown,
    WorkerLost,
)
from outrider.server.engine.messages import Accepted, Event, Ready, Request, TokenEvent

Kind = Literal["error", "invalid", "overloaded", "lost", "deadline", "draining"]
KINDS: dict[type[EngineError], Kind] = {
    InvalidRequest: "invalid",
    Overloaded: "overloaded",
    WorkerLost: "lost",
    DeadlineExceeded: "deadline",
    ShuttingDown: "draining",
}


class Call(msgspec.Struct, frozen=True):
    """A request on its way to a replica."""

    request: Request
    age_seconds: float  # age since its arrival, because the machines' clocks differ
    admitted: bool  # exempt from the queue's bounds


class Error(msgspec.Struct, frozen=True, tag=True):
    """The end of a request that failed."""

    kind: Kind
    message: str  # may be shown to the client
    reason: str = ""  # reason of an overload
    seconds: float = 0.0  # time after which an overload may be over


Batch = list[Accepted | TokenEvent | Error]

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode


def encode_batch(items: Sequence[Event | EngineError]) -> bytes:
    """One item of a stream."""
    return encode([_plain(item) if isinstance(item, EngineError) else item for item in items])


def decode_batch(data: bytes) -> list[Event | EngineError]:
    """The events, and the error after them."""
    return [_exception(item) if isinstance(item, Error) else item for item in _decode_batch(data)]


def _plain(error: EngineError) -> Error:
    kind = KINDS.get(type(error), "error")
    if isinstance(error, Overloaded):
        return Error(kind, str(error), error.reason, error.seconds)
    return Error(kind, str(error))


def _exception(error: Error) -> EngineError:
    match error.kind:
        case "overloaded":
            return Overloaded(error.message, error.reason, error.seconds)
        case "draining":
            return ShuttingDown()
    types = {kind: exception for exception, kind in KINDS.items()}
    return types.get(error.kind, EngineError)(error.message)
