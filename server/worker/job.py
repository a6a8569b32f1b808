"""The worker process: owns the model, the sessions and the decode loop; speaks only messages.

Promises that one request's failure never touches another, and that a cancelled request costs at most one more step.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections import deque
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from drafters.interface import Logprobs, Source
from drafters.tables.array_file import ArrayFileError
from server.engine import messages
from server.engine.messages import (
    Cancel,
    Failed,
    FromWorker,
    Ready,
    Refused,
    Request,
    Shutdown,
    Status,
    StepReport,
    TokenEvent,
    TokenLogprobs,
)
from server.engine.transport import WorkerSide
from server.settings import Settings
from server.telemetry.logs import configure
from server.worker.detokenizer import AnswerText
from server.worker.runtime import Runtime, load
from server.worker.sessions import Session, SessionStore
from verify.decode import DecodeOptions, Generation, PromptError, Step
from verify.errors import ModelError
from verify.grammar import GrammarError
from verify.sampling_params import SamplingParams

log = logging.getLogger("outrider.worker")
IDLE_SECONDS = 0.5
SILENT_SECONDS = 0.5  # while a prompt is read
LABELS = {int(source): source.label for source in Source}


class Job:
    """A request at work: its choices one after the other, all in one session's cache."""

    def __init__(self, request: Request, session: Session, loaded: Runtime, settings: Settings) -> None:
        self.request = request
        self.session = session
        self._loaded = loaded
        self._name = request.drafter or settings.speculation.drafter
        self._nodes = settings.speculation.max_nodes if request.max_nodes is None else request.max_nodes
        self._choice = 0
        self._cached_tokens: int | None = None  # known once the first choice has begun
        self._begin()

    def _begin(self) -> None:
        request = self.request
        params = request.params
        if self._choice:
            params = choice_params(params, self._choice)
        budget = self._loaded.budget(self._name, self._nodes)
        stop_ids = self._loaded.stop_ids.union(request.stop_token_ids)
        prediction = tuple(request.prediction)
        scores = request.scores_prompt
        options = DecodeOptions(params, request.max_tokens, stop_ids, prediction=prediction, scores_prompt=scores, **budget)
        drafter = self.session.drafter(self._name, self._loaded.resources_of(request.principal))
        grammar = None if request.grammar is None else self._loaded.grammars.compile(request.grammar)
        self._generation = Generation(self.session.verifier, drafter, np.array(request.prompt, np.int32), options, grammar)
        if self._cached_tokens is None:
            self._cached_tokens = self._generation.reused_tokens
        self._text = AnswerText(
            self._loaded.tokenizer, request.stop, request.skip_special_tokens, request.keep_stop, params.min_tokens
        )
        self._begun = False  # the choice has had an event

    def step(self) -> TokenEvent | None:
        """One step; None while the prompt is read."""
        step = self._generation.step()
        finish = step.finish
        if step.tree is None and finish is None:
            return None
        # A stop token is counted, but it is no text.
        shown = len(step.tokens) - (finish == "stop" and not self.request.keep_stop)
        text, used = self._text.feed(step.tokens[:shown])
        if self._text.stopped:
            finish = "stop"
            self._generation.take_back(len(step.tokens) - used)
        elif finish is not None:
            text += self._text.finish()
            finish = "stop" if self._text.stopped else finish
        scores = None if self._begun else self._generation.prompt_logprobs
        self._begun = True
        choice = self._choice
        last = finish is not None and choice + 1 == self.request.choices
        if finish is not None:
            self._generation.close()
            if not last:
                self._choice += 1
                self._begin()
        cached = self._cached_tokens or 0
        known = None if step.logprobs is None else logprobs_of(step.logprobs, used)
        scored = None if scores is None else logprobs_of(scores, len(scores.chosen))
        tokens = step.tokens if used == shown else step.tokens[:used]
        return TokenEvent(self.request.id, choice, tokens, text, finish, report(step), cached, last, known, scored)

    def close(self) -> None:
        self._generation.close()


def failed(request: Request, error: Exception) -> Failed:
    """What the client is told; what it cannot mend goes to the log."""
    if isinstance(error, (PromptError, GrammarError)):
        return Failed(request.id, str(error), wrong=True)
    log.error("request %s failed", request.id, exc_info=error)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Failed(request.id, "There is no memory for this request; try again later, or with a shorter context.")
    return Failed(request.id, "The model failed on this request; the server's log says why.")


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the choice numbered `choice` > 0: the same, with a seed of its own."""
    return replace(params, seed=params.seed + choice * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def logprobs_of(found: Logprobs, count: int) -> TokenLogprobs:
    """The first `count` tokens' as they cross."""
    return TokenLogprobs(found.chosen[:count].tolist(), found.top_ids[:count].tolist(), found.top[:count].tolist())


def report(step: Step) -> StepReport | None:
    """The step in numbers, for metrics; None where the target made none."""
    if step.tree is None:
        return None
    sources = step.tree.source
    return StepReport(
        step.draft_seconds, step.verify_seconds, step.commit_seconds, by_source(sources), by_source(sources[step.accepted])
    )


def by_source(sources: NDArray[np.uint8]) -> dict[str, int]:
    """How many nodes (uint8 [N]) come from each source, by its name."""
    return {LABELS[i]: count for i, count in enumerate(np.bincount(sources).tolist()) if count}


class Worker:
    """The loop: take messages, give each active request one step in turn, send what came of it."""

    def __init__(self, settings: Settings, loaded: Runtime, wire: WorkerSide) -> None:
        self._settings = settings
        self._loaded = loaded
        self._wire = wire
        kept = settings.sessions
        self._sessions = SessionStore(loaded.runner, kept.capacity, kept.ttl_seconds, loaded.slots)
        self._waiting: deque[Request] = deque()
        self._active: deque[Job] = deque()
        self._said = 0.0  # time.monotonic() of the last message

    def run(self) -> None:
        """Until a Shutdown message. Raises EOFError or OSError if the front end is gone."""
        while self._receive():
            self._admit()
            if self._active:
                self._step(self._active[0])
                self._active.rotate(-1)
            elif self._sessions.expire():
                self._report()

    def _receive(self) -> bool:
        """Takes the messages that are there, waiting only when there is nothing to do; False = end."""
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
        """Starts waiting requests, in order but for those whose session is busy."""
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
                self._active.append(Job(request, session, self._loaded, self._settings))
            except Exception as error:
                if session is not None:
                    self._sessions.release(session)
                self._send(failed(request, error))

    def _step(self, job: Job) -> None:
        try:
            event = job.step()
        except torch.AcceleratorError:
            raise  # the device is lost to this process; its successor gets it anew
        except Exception as error:
            job.session.verifier.truncate(0)
            self._finish(job)
            job.session.drafters.clear()  # whatever state they are in
            self._send(failed(job.request, error))
            return
        if event is None:  # a chunk of the prompt was read; over a long one, the front end hears that work goes on
            if time.monotonic() - self._said > SILENT_SECONDS:
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
        self._said = time.monotonic()
        self._wire.send(messages.encode(message))


def end_with_parent() -> None:
    """Ends this process, whatever it is doing, once the front end is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def main(settings: Settings, end: socket.socket, spawned: float) -> None:
    """The process's entry point: load, say Ready (or Refused), and work. `spawned` is when it was started, time.monotonic()."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    configure(settings.logging)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    wire = WorkerSide(end)
    try:
        loaded = load(settings)
    except (ModelError, ArrayFileError) as error:
        wire.send(messages.encode(Refused(str(error))))
        return
    shape = loaded.runner.cache_shape
    dtype = str(shape.dtype).removeprefix("torch.")
    slot_bytes = shape.bytes_for(loaded.runner.context_tokens)
    seconds = time.monotonic() - spawned
    ready = Ready(loaded.runner.context_tokens, str(shape.device), dtype, seconds, loaded.slots, slot_bytes)
    wire.send(messages.encode(ready))
    gc.freeze()  # what is loaded stays; the collector need not look through it again and again
    with contextlib.suppress(EOFError, ConnectionError):  # the front end is gone
        Worker(settings, loaded, wire).run()
    logging.shutdown()
    os._exit(0)  # taking torch apart piece by piece would take seconds
