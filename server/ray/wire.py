"""Messages between ingress and replicas through Ray: bytes of msgpack, so that no message can hold code.

A call is one request. Its answer is a stream of batches: events, and at most one error at the end.
"""

from collections.abc import Sequence

import msgspec

from outrider.server.engine import engine
from outrider.server.engine.messages import Accepted, Event, Ready, Request, TokenEvent

# Errors whose only argument is their message, by their names.
KINDS = {each.__name__: each for each in (engine.InvalidRequest, engine.WorkerLost, engine.DeadlineExceeded, engine.Unread)}


class Call(msgspec.Struct, frozen=True):
    request: Request
    age_seconds: float  # age since its arrival, because the machines' clocks differ
    admitted: bool  # exempt from the queue's bounds


class Error(msgspec.Struct, frozen=True, tag=True):
    """The end of a request that failed."""

    kind: str  # the error's class
    message: str  # may be shown to the client
    reason: str = ""  # reason of an overload
    seconds: float = 0.0  # time after which an overload may be over


Batch = list[Accepted | TokenEvent | Error]

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_ready = msgspec.msgpack.Decoder(Ready).decode
_decode_batch = msgspec.msgpack.Decoder(Batch).decode


def encode_batch(items: Sequence[Event | engine.EngineError]) -> bytes:
    return encode([_plain(item) if isinstance(item, engine.EngineError) else item for item in items])


def decode_batch(data: bytes) -> list[Event | engine.EngineError]:
    """The events, and the error after them."""
    return [_exception(item) if isinstance(item, Error) else item for item in _decode_batch(data)]


def _plain(error: engine.EngineError) -> Error:
    overload = (error.reason, error.seconds) if isinstance(error, engine.Overloaded) else ()
    return Error(type(error).__name__, str(error), *overload)


def _exception(error: Error) -> engine.EngineError:
    match error.kind:
        case "Overloaded":
            return engine.Overloaded(error.message, error.reason, error.seconds)
        case "ShuttingDown":
            return engine.ShuttingDown()
    return KINDS.get(error.kind, engine.EngineError)(error.message)
