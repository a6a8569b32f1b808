"""The worker's entry point: the first message, and the refusal of a model that cannot be loaded."""

from __future__ import annotations

import gc
import socket

from outrider.server.engine import messages
from outrider.server.engine.messages import Refused
from outrider.server.engine.transport import WorkerSide
from outrider.server.settings import load_settings
from outrider.server.worker.main import run


def test_a_model_that_does_not_load_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            run(load_settings(None, {"model.path": "/no/such/folder"}), WorkerSide(theirs), 0.0)
        finally:
            gc.unfreeze()
        [message] = WorkerSide(ours).receive(1)
    assert messages.decode_from_worker(message) == Refused(
        "There is no folder '/no/such/folder'; give a model's folder, or a hub id such as Qwen/Qwen3-8B."
    )
