"""The decode loop: gives each active request one step in turn. Communicates only by messages.

Promises that one request's failure never affects another, and that a cancelled request costs at most one more step.
"""

from __future__ import annotations

import logging
import time
from collections import deque

import torch

from server.engine import messages
from server.engine.messages import Cancel, Failed, FromWorker, Request, Shutdown, Status
from server.engine.transport import WorkerSide
from server.settings import Settings
from server.worker.job import Job
from server.worker.runtime import Runtime
from server.worker.sessions import SessionStore
from verify.decode import PromptError
from verify.grammar import GrammarError

log = logging.getLogger("outrider.worker")
IDLE_SECONDS = 0.5  # to wait for messages when there is no work
REPORT_SECONDS = 0.5  # of silence during prefill, before a Status message shows that the worker is alive


class Worker:
    """Receives messages, admits requests, steps them round-robin and sends their events."""

    def __init__(self, settings: Settings, runtime: Runtime, wire: WorkerSide) -> None:
        self._settings = settings
        self._runtime = runtime
        self._wire = wire
        self._sessions = SessionStore(runtime.runner, settings.sessions.capacity, settings.sessions.ttl_seconds, runtime.slots)
        self._waiting: deque[Request] = deque()
        self._active: deque[Job] = deque()
        self._last_sent_at = 0.0  # time.monotonic()

    def run(self) -> None:
        """Runs until a Shutdown message. Raises EOFError or OSError if the front end has closed the socket."""
        while self._receive():
            self._runtime.kernels.poll()
            self._admit()
            if self._active:
                self._step(self._active[0])
                self._active.rotate(-1)
            elif self._sessions.expire():
                self._report()

    def _receive(self) -> bool:
        """Handles the messages that have arrived; waits only when idle. Returns False on Shutdown."""
        for data in self._wire.receive(0 if self._active else IDLE_SECONDS):
            match message := messages.decode_to_worker(data):
                case Shutdown():
                    return False
                case Cancel(id):
                    self._cancel(id)
                case Request():
                    self._waiting.append(message)
        return True

    def _admit(self) -> None:
        """Starts waiting requests in order, skipping those whose session is busy."""
        for _ in range(len(self._waiting)):
            if len(self._active) >= self._settings.scheduling.max_active:
                return
            request = self._waiting.popleft()
            session = None
            try:
                session = self._sessions.acquire(f"{request.principal}\0{request.session}" if request.session else None)
                if session is None:
                    self._waiting.append(request)
                    continue
                self._active.append(Job(request, session, self._runtime, self._settings))
            except Exception as error:
                if session is not None:
                    self._sessions.release(session)
                self._send(failure(request, error))

    def _step(self, job: Job) -> None:
        try:
            event = job.step()
        except torch.AcceleratorError:
            raise  # only a new process can use the device again
        except Exception as error:
            job.session.verifier.truncate(0)
            self._finish(job)
            job.session.drafters.clear()  # their state is unknown
            self._send(failure(job.request, error))
            return
        if event is None:  # prefill of one chunk of the prompt
            if time.monotonic() - self._last_sent_at > REPORT_SECONDS:
                self._report()
            return
        if event.last:
            self._finish(job)
        self._send(event)

    def _finish(self, job: Job) -> None:
        self._active.remove(job)
        job.close()
        self._sessions.release(job.session)
        self._report()

    def _report(self) -> None:
        self._send(Status(len(self._sessions), self._sessions.usage_ratio))

    def _cancel(self, request_id: str) -> None:
        for job in [job for job in self._active if job.request.id == request_id]:
            self._finish(job)
        self._waiting = deque(request for request in self._waiting if request.id != request_id)

    def _send(self, message: FromWorker) -> None:
        self._last_sent_at = time.monotonic()
        self._wire.send(messages.encode(message))


def failure(request: Request, error: Exception) -> Failed:
    """The message for the client. An error that the client cannot fix is logged."""
    if isinstance(error, (PromptError, GrammarError)):
        return Failed(request.id, str(error), client_error=True)
    log.error("request %s failed", request.id, exc_info=error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failed(request.id, "There is not enough memory for this request; try again later or use a shorter context.")
    return Failed(request.id, "The model failed on this request; see the server's log.")
