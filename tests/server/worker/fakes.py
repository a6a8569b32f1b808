"""A worker and its runtime over the tiny model, with a tokenizer of letters."""

import socket
from collections.abc import Mapping, Sequence
from typing import Any, cast

from outrider.drafters.registry import Resources
from outrider.server.engine import messages
from outrider.server.engine.messages import FromWorker, Request, TokenEvent, ToWorker
from outrider.server.engine.transport import WorkerSide, framed
from outrider.server.settings import Settings, load_settings
from outrider.server.worker.loop import Worker
from outrider.server.worker.runtime import Runtime
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams


class Letters:
    """Token n is the letter number n modulo 26."""

    special_ids = frozenset[int]()

    def drops_space(self, prompt: Sequence[int], continues: bool) -> bool:
        return False

    def bytes_of(self, token: int) -> bytes:
        return bytes([ord("a") + token % 26])

    def text_of(self, tokens: list[int]) -> str:
        return b"".join(map(self.bytes_of, tokens)).decode()


def tiny_runtime(runner: TorchRunner, settings: Settings, stop_ids: frozenset[int] = frozenset(), slots: int = 2) -> Runtime:
    """A runtime as `load` returns it, over a small model."""
    return Runtime(
        runner=runner,
        tokenizer=cast(Any, None),
        tokens=cast(Any, Letters()),
        stop_ids=stop_ids,
        resources=Resources(),
        own_resources={},
        max_active=2,
        slots=slots,
        grammars=cast(Any, None),
        curve=None,
    )


class Rig:
    """A worker with two slots, or more, over the tiny model. Messages from the front end arrive before the next step."""

    def __init__(self, runner: TorchRunner, settings: Mapping[str, Any] | None = None, slots: int = 2) -> None:
        given = {"speculation.drafter": "none", "scheduling.max_active": 2, **(settings or {})}
        self.settings = load_settings(None, given)
        self._ours, theirs = socket.socketpair()
        self._wire = WorkerSide(self._ours)
        self.worker = Worker(self.settings, tiny_runtime(runner, self.settings, slots=slots), WorkerSide(theirs))
        self._theirs = theirs
        self.sent: list[FromWorker] = []  # by the worker

    def send(self, *sent: ToWorker) -> bool:
        """Delivers messages; returns what the worker's `receive` returns."""
        self._ours.sendall(b"".join(framed(messages.encode(message)) for message in sent))
        return self.worker.receive()

    def step(self, steps: int = 100) -> None:
        """Runs up to `steps` rounds."""
        for _ in range(steps):
            self.worker.step()
        self.sent += [messages.decode_from_worker(data) for data in self._wire.receive(0.01)]

    @property
    def order(self) -> list[str]:
        return [message.id for message in self.sent if isinstance(message, TokenEvent)]

    def tokens(self, id: str) -> list[int]:
        return [token for each in self.sent if isinstance(each, TokenEvent) and each.id == id for token in each.tokens]

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


def request(id: str, **fields: Any) -> Request:
    return Request(**{"id": id, "prompt": [1, 2, 3], "params": SamplingParams(temperature=0), "max_tokens": 4, **fields})
