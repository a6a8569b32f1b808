"""The worker process's entry point: loads the model, reports Ready or Refused, and runs the decode loop.

Watches the socket before it imports torch, so that the process ends with the front end even while it is loading.
"""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
from importlib import import_module

from outrider.server.engine import messages
from outrider.server.engine.messages import Ready, Refused, Start
from outrider.server.engine.program import connected
from outrider.server.engine.transport import WorkerSide
from outrider.server.imports import frozen, hide_torch, keep_compiled
from outrider.server.settings import Settings
from outrider.server.settings.tree import decode_settings
from outrider.server.system import tolerate_stderr
from outrider.server.telemetry.logs import configure

# The Start message must arrive in this time.
START_SECONDS = 60.0


def main(argument: str) -> None:
    """Runs a worker over the socket, until the front end stops it or closes the socket."""
    tolerate_stderr()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one to a whole process group: the front end lets streams end first
    wire = WorkerSide(connected(argument))
    threading.Thread(target=end_with_front_end, args=(wire,), daemon=True).start()
    with frozen():
        import_module("outrider.server.worker.loop")  # while the front end reads the settings
    try:
        start = receive_start(wire)
    except (EOFError, ConnectionError):
        os._exit(1)
    settings = decode_settings(start.settings)
    configure(settings.logging)
    run(settings, wire, start.started_at)
    logging.shutdown()
    os._exit(0)  # a regular exit spends seconds on torch's teardown


def end_with_front_end(wire: WorkerSide) -> None:
    """Ends this process, whatever it is doing, when the front end closes the socket or dies."""
    wire.wait_closed()
    os._exit(1)


def receive_start(wire: WorkerSide) -> Start:
    """The first message. Raises EOFError if the front end has closed the socket."""
    while True:
        for data in wire.receive(START_SECONDS):
            message = messages.decode_to_worker(data)
            assert isinstance(message, Start)
            return message


def run(settings: Settings, wire: WorkerSide, started_at: float) -> None:
    """Loads and serves. A model or table that cannot be loaded is reported as Refused."""
    with frozen():
        if settings.needs_torch:
            keep_compiled(settings.speculation.cost_folder)
        else:
            hide_torch()
        from outrider.drafters.tables.array_file import ArrayFileError
        from outrider.server.worker.loop import Worker
        from outrider.server.worker.runtime import load, memory_of
        from outrider.verify.errors import ModelError, loading
        from outrider.verify.model.cache.windows import held_bytes

    try:
        with loading(f"The model at {settings.model.path!r}", ArrayFileError):
            runtime = load(settings)
    except (ModelError, ArrayFileError) as error:
        wire.send(messages.encode(Refused(str(error))))
        return
    shape, context_tokens = runtime.runner.cache_shape, runtime.runner.context_tokens
    slot_bytes = shape.slot_bytes + held_bytes(shape, context_tokens)
    dtype, kv_dtype = runtime.runner.dtypes
    ready = Ready(
        context_tokens=context_tokens,
        device=", ".join(str(part.device) for part in shape.parts),
        dtype=dtype,
        seconds=time.monotonic() - started_at,
        slots=runtime.slots,
        max_active=runtime.max_active,
        slot_bytes=slot_bytes,
        invariance=runtime.runner.invariance,
        weight_bits=runtime.runner.weight_bits,
        kv_dtype=kv_dtype,
        memory=memory_of(runtime, settings, slot_bytes),
        kernels=runtime.runner.kernels,
        reads_pictures=runtime.runner.pictures is not None,
    )
    wire.send(messages.encode(ready))
    gc.freeze()  # excludes the model and the tables from every later collection
    with contextlib.suppress(EOFError, ConnectionError):  # the front end has closed the socket
        Worker(settings, runtime, wire).run()
