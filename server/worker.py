"""The worker process: owns the model, the sessions and the decode loop; speaks only messages.

Promises that one request's failure never touches another, and that a cancelled request costs at most one more step.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch
import zmq
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import models
from drafters import datastore, ngram
from drafters.array_file import ArrayFileError
from drafters.draft import MAX_NODES, Source
from drafters.registry import DrafterName, Options, Resources, warm
from drafters.suffix import Corpus
from server import messages
from server.messages import Cancel, Failed, FromWorker, Ready, Refused, Request, Shutdown, Status, StepReport, TokenEvent
from server.sessions import Session, SessionStore
from server.settings import Settings
from server.text import AnswerText
from verify.cache import slots_that_fit
from verify.cost import CostCurve, load_or_measure
from verify.decode import DecodeOptions, Generation, PromptError, Step
from verify.model import LoadOptions, ModelError, ModelRunner, fingerprint, load_model, load_tokenizer, stop_ids
from verify.sampling import SamplingParams

log = logging.getLogger("outrider.worker")
IDLE_POLL_MILLISECONDS = 500
SMALL_MODEL_BYTES = 64_000_000


class Budget(TypedDict):
    """The part of DecodeOptions that says how much is drafted."""

    max_nodes: int
    curve: CostCurve | None


@dataclass
class Engine:
    """What a worker has loaded: everything that its requests share."""

    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    resources: Resources
    own_resources: dict[str, Resources]  # of the principals that have datastores of their own
    slots: int  # contexts that the device holds at once
    curve: CostCurve | None  # where the settings leave the nodes of a step to it

    def resources_of(self, principal: str) -> Resources:
        """What the drafters of a principal's requests read."""
        return self.own_resources.get(principal, self.resources)

    def budget(self, drafter: DrafterName, max_nodes: int | Literal["auto"]) -> Budget:
        """How many nodes a step may have, as DecodeOptions take it."""
        if max_nodes != "auto":
            return {"max_nodes": max_nodes, "curve": None}
        # Lookahead's window is no guess: its nodes are there for what the target says of them.
        return {"max_nodes": MAX_NODES, "curve": None if drafter == "lookahead" else self.curve}


def load(settings: Settings) -> Engine:
    """Loads model, tokenizer and tables and warms the kernels. Raises ModelError or ArrayFileError with one sentence."""
    chosen = settings.model
    disable_progress_bar()
    options = LoadOptions(
        *(chosen.path, chosen.dtype, chosen.device, chosen.context_tokens, chosen.trust_remote_code),
        *(chosen.pack, chosen.trace),
    )
    runner = load_model(options)
    torch.set_num_threads(chosen.threads or default_threads(runner))
    slots = plan_slots(runner, settings)
    tokenizer = load_tokenizer(chosen.path, chosen.trust_remote_code)
    vocabulary = max(runner.vocabulary, len(tokenizer)) + 1
    mark = fingerprint(tokenizer)
    resources = load_resources(settings.speculation.options, mark, vocabulary)
    own = {
        name: replace(resources, corpus=[*resources.corpus, *load_corpus(key.datastores, mark)])
        for name, key in settings.auth.keys.items()
        if key.datastores
    }
    for each in {len(each.corpus): each for each in (resources, *own.values())}.values():
        warm(each)  # kernels are compiled for a number of blocks
    folder = settings.speculation.cost_folder
    measured = settings.speculation.max_nodes == "auto"
    curve = load_or_measure(runner, folder and folder.expanduser()) if measured else None
    return Engine(runner, tokenizer, stop_ids(runner.model, tokenizer), resources, own, slots, curve)


def plan_slots(runner: ModelRunner, settings: Settings) -> int:
    """How many contexts the device holds: the settings' number, else what sessions need and memory has. Raises ModelError."""
    least = settings.scheduling.max_active
    fitting = slots_that_fit(runner.cache_shape, runner.context_tokens)
    wanted = settings.sessions.slots or min(fitting, settings.sessions.capacity + least)
    if min(fitting, wanted) < least:
        size = runner.cache_shape.bytes_for(runner.context_tokens) / 1e9
        raise ModelError(
            f"{least} requests at once need {least} contexts of {size:.1f} GB each, but {min(fitting, wanted)} fit;"
            " lower model.context_tokens or scheduling.max_active, or raise sessions.slots."
        )
    return wanted


def default_threads(runner: ModelRunner) -> int:
    """All cores, but one for a small model: its forwards gain little from a second, and the front end needs it more."""
    return 1 if runner.weight_bytes < SMALL_MODEL_BYTES else os.cpu_count() or 1


def load_resources(options: Options, tokenizer_fingerprint: str, vocabulary: int) -> Resources:
    """Maps the tables that drafters read. Raises ArrayFileError with one sentence."""
    corpus = load_corpus(options.retrieval.datastores, tokenizer_fingerprint)
    try:
        table = options.trigram.table
        base = ngram.load(models.BASE_TABLE if table is None else Path(table), tokenizer_fingerprint)
    except ArrayFileError:
        if table is not None:
            raise
        base = ngram.empty_base()  # the embedded table belongs to the embedded tokenizer only
    return Resources(options, base, corpus, vocabulary)


def load_corpus(datastores: Iterable[str], tokenizer_fingerprint: str) -> list[Corpus]:
    """Maps all blocks of the datastores at these paths. Raises ArrayFileError with one sentence."""
    return [block for folder in datastores for block in datastore.load(Path(folder), tokenizer_fingerprint)]


class Job:
    """A request at work: its choices one after the other, all in one session's cache."""

    def __init__(self, request: Request, session: Session, engine: Engine, settings: Settings) -> None:
        self.request = request
        self.session = session
        self._engine = engine
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
        budget = self._engine.budget(self._name, self._nodes)
        options = DecodeOptions(params, request.max_tokens, self._engine.stop_ids, **budget)
        drafter = self.session.drafter(self._name, self._engine.resources_of(request.principal))
        self._generation = Generation(self.session.verifier, drafter, np.array(request.prompt, np.int32), options)
        if self._cached_tokens is None:
            self._cached_tokens = self._generation.reused_tokens
        self._text = AnswerText(self._engine.tokenizer, request.stop)

    def step(self) -> TokenEvent | None:
        """One step; None while the prompt is read."""
        step = self._generation.step()
        if step.tree is None:
            return None
        text, used = self._text.feed(step.tokens)
        finish = step.finish
        if self._text.stopped:
            finish = "stop"
            self._generation.take_back(len(step.tokens) - used)
        elif finish is not None:
            text += self._text.finish()
            finish = "stop" if self._text.stopped else finish
        choice = self._choice
        last = finish is not None and choice + 1 == self.request.choices
        if finish is not None:
            self._generation.close()
            if not last:
                self._choice += 1
                self._begin()
        return TokenEvent(
            self.request.id, choice, step.tokens[:used], text, finish, report(step), self._cached_tokens or 0, last
        )

    def close(self) -> None:
        self._generation.close()


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the choice numbered `choice` > 0: the same, with a seed of its own."""
    return replace(params, seed=params.seed + choice * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def report(step: Step) -> StepReport:
    """The step in numbers, for metrics."""
    assert step.tree is not None
    drafted = Counter(Source(int(s)).label for s in step.tree.source)
    accepted = Counter(Source(int(step.tree.source[row])).label for row in step.accepted)
    return StepReport(step.draft_seconds, step.verify_seconds, step.commit_seconds, dict(drafted), dict(accepted))


class Worker:
    """The loop: take messages, give each active request one step in turn, send what came of it."""

    def __init__(self, settings: Settings, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self._settings = settings
        self._engine = engine
        self._inbox = inbox
        self._outbox = outbox
        kept = settings.sessions
        self._sessions = SessionStore(engine.runner, kept.capacity, kept.ttl_seconds, engine.slots)
        self._waiting: deque[Request] = deque()
        self._active: deque[Job] = deque()

    def run(self) -> None:
        """Until a Shutdown message."""
        while self._receive():
            self._admit()
            if self._active:
                self._step(self._active[0])
                self._active.rotate(-1)
            elif self._sessions.expire():
                self._report()

    def _receive(self) -> bool:
        """Takes all messages that are there, waiting only when there is nothing to do; False = end."""
        wait = 0 if self._active else IDLE_POLL_MILLISECONDS
        while self._inbox.poll(wait):
            message = messages.decode_to_worker(self._inbox.recv())
            wait = 0
            match message:
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
                self._active.append(Job(request, session, self._engine, self._settings))
            except Exception as error:
                if session is not None:
                    self._sessions.release(session)
                self._send(Failed(request.id, self._explain(request, error)))

    def _explain(self, request: Request, error: Exception) -> str:
        """What the client is told; what it cannot mend goes to the log."""
        if isinstance(error, PromptError):
            return str(error)
        log.error("request %s failed", request.id, exc_info=error)
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return "There is no memory for this request; try again later, or with a shorter context."
        return "The model failed on this request; the server's log says why."

    def _step(self, job: Job) -> None:
        try:
            event = job.step()
        except Exception as error:
            job.session.verifier.truncate(0)
            self._finish(job)
            job.session.drafters.clear()  # whatever state they are in
            self._send(Failed(job.request.id, self._explain(job.request, error)))
            return
        if event is None:
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
        self._outbox.send(messages.encode(message))


def end_with_parent() -> None:
    """Ends this process, whatever it is doing, once the front end is gone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def main(settings: Settings, to_worker: str, from_worker: str) -> None:
    """The process's entry point: load, say Ready (or Refused), and work. Both endpoints are zmq addresses."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides
    started = time.monotonic()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.connect(to_worker)
    outbox.connect(from_worker)
    try:
        engine = load(settings)
    except (ModelError, ArrayFileError) as error:
        outbox.send(messages.encode(Refused(str(error))))
        context.destroy(linger=1000)
        return
    shape = engine.runner.cache_shape
    dtype = str(shape.dtype).removeprefix("torch.")
    slot_bytes = shape.bytes_for(engine.runner.context_tokens)
    seconds = time.monotonic() - started
    ready = Ready(engine.runner.context_tokens, str(shape.device), dtype, seconds, engine.slots, slot_bytes)
    outbox.send(messages.encode(ready))
    Worker(settings, engine, inbox, outbox).run()
    context.destroy(linger=1000)
