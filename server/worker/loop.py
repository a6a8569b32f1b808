"""The decode loop: runs rounds of all active requests. Communicates only by messages.

Promises that one request's failure never affects another, that a cancelled request costs at most one more step, and that a
paused one holds nothing that another needs.
"""

import logging
import time

import numpy as np

from outrider.server.engine import messages
from outrider.server.engine.transport import WorkerSide
from outrider.server.settings import Settings
from outrider.server.worker.job import Job
from outrider.server.worker.runtime import Runtime, max_active, memory_bytes
from outrider.server.worker.scheduler import Entry, Scheduler
from outrider.server.worker.session import SessionKey
from outrider.server.worker.sessions import SessionStore
from outrider.server.worker.storage.session_files import session_files
from outrider.verify.constraints.grammar import GrammarError
from outrider.verify.controller import Controller
from outrider.verify.errors import lost_device, out_of_memory
from outrider.verify.model.cache.kv_cache import OutOfPages
from outrider.verify.round import Round
from outrider.verify.stream import PromptError, Step, check_prompt

log = logging.getLogger("outrider.worker")
# Without work, the worker waits for messages this long at a time.
IDLE_SECONDS = 0.5
# A round without steps is silent for at most this share of scheduling.stall_seconds.
SILENT_SHARE = 0.1
# After this silence while a prompt is read, a Status message shows that the worker is alive.
REPORT_SECONDS = 0.5
# A request that fails to start with one of these errors leaves its session unchanged.
CLIENT_ERRORS = (PromptError, GrammarError)


class Worker:
    """Receives messages, starts requests, runs rounds of them and sends their events."""

    def __init__(self, settings: Settings, runtime: Runtime, wire: WorkerSide) -> None:
        self._settings = settings
        self._runtime = runtime
        self._wire = wire
        kept = settings.sessions
        self.sessions = SessionStore(
            runtime.runner,
            kept.capacity,
            kept.ttl_seconds,
            runtime.slots,
            automatic=settings.finds_sessions_by_text,
            kv_bytes=kept.kv_bytes,
            memory_bytes=memory_bytes(settings),
            files=session_files(settings, runtime.runner),
            learn=runtime.learn,
        )
        self.scheduler = Scheduler(self.sessions, runtime.max_active)
        self._launched: tuple[list[Job], Round] | None = None  # a round that is to be finished, and its jobs
        self._controller = Controller(SILENT_SHARE * settings.scheduling.stall_seconds)
        self._last_sent_at = 0.0  # time.monotonic()

    def run(self) -> None:
        """Runs until a Shutdown message. Raises EOFError or OSError if the front end has closed the socket."""
        self._report()
        while self.receive():
            if self.step():
                continue
            if self.sessions.expire():
                self._report()
            elif self.scheduler.is_idle:
                self.sessions.save()
                self._runtime.measure_again()
                self._runtime.save_findings()
        self.sessions.save_all(messages.SAVE_SECONDS)
        self._runtime.save_findings()

    def step(self) -> bool:
        """Runs a round of all active jobs, or of one half while the device computes the other half's; False without any."""
        self.scheduler.admit(self._start)
        if not self.scheduler.active:
            return False
        if self._overlaps:
            self._overlapped_round()
        else:
            self._settle()
            self._make_room()
            if jobs := self.scheduler.active:
                self._finish(jobs, self._launch(jobs))
        return True

    def receive(self) -> bool:
        """Handles the messages that have arrived; waits only when idle. Returns False on Shutdown."""
        for data in self._wire.receive(0 if self.scheduler.active else IDLE_SECONDS):
            match message := messages.decode_to_worker(data):
                case messages.Shutdown():
                    return False
                case messages.Request():
                    self._accept(message)
                case messages.Cancel(id):
                    self._cancel(id)
                case messages.Pause(id):
                    self._settle()
                    self.scheduler.pause(id)
                case messages.Resume(id):
                    self.scheduler.resume(id)
                case messages.Forget(principal, session, adapter):
                    self.sessions.forget(SessionKey(self._runtime.owner_of(principal, adapter), session))
        return True

    def _accept(self, request: messages.Request) -> None:
        """Checks what the client can fix, before its stream begins."""
        try:
            check_prompt(request.prompt, self._runtime.runner.context_tokens)
            if request.grammar is not None:
                self._runtime.grammars.compile(request.grammar, principal=request.principal)
        except CLIENT_ERRORS as error:
            self._send(failure(request, error))
        else:
            self.scheduler.add(request)
            self._send(messages.Accepted(request.id))

    def _start(self, entry: Entry) -> bool:
        """Begins a request, or continues a job; returns False if it must wait."""
        return self._continue(entry) if isinstance(entry, Job) else self._begin(entry)

    def _begin(self, request: messages.Request) -> bool:
        """Starts a request; returns False if it must wait."""
        try:
            owner = self._runtime.owner_of(request.principal, request.adapter)
            prompt = np.array(request.prompt, np.int32)
            session = self.sessions.acquire(owner, request.session, prompt, request.temporary)
        except lost_device():
            raise
        except Exception as error:
            self._send(failure(request, error))
            return True
        if session is None:
            return False
        try:
            self.scheduler.active.append(Job(request, session, self._runtime, self._settings))
        except Exception as error:
            if not isinstance(error, CLIENT_ERRORS):
                session.reset()
            self.sessions.release(session)
            self._send(failure(request, error))
        return True

    def _continue(self, job: Job) -> bool:
        """Continues a job after a pause; returns False if it must wait. An error ends the job."""
        try:
            if not self.sessions.resume(job.session):
                return False
        except lost_device():
            raise
        except Exception as error:
            self._deliver(job, error)
            return True
        self.scheduler.active.append(job)
        return True

    @property
    def _overlaps(self) -> bool:
        """Whether one half of the jobs should be computed on the device while the host works for the other."""
        is_possible = self._settings.scheduling.overlap and self._runtime.runner.device.type != "cpu"
        return is_possible and len(self.scheduler.active) > 1 and self._controller.overlaps()

    def _overlapped_round(self) -> None:
        """Launches a round of half of the jobs, and finishes the one that was launched before, of the other half."""
        self._make_room()
        before, active = self._launched, self.scheduler.active
        busy = before[0] if before else []
        half = [job for job in active if job not in busy][: (len(active) + 1) // 2]
        self._launched = (half, self._launch(half, clone_logits=True)) if half else None
        if before is not None:
            self._finish(*before)

    def _launch(self, jobs: list[Job], clone_logits: bool = False) -> Round:
        """A round of these jobs, whose forward has started."""
        awaited = {job.stream: self.sessions.awaited_rows(job.session) for job in jobs}
        launched = Round([job.stream for job in jobs], self._controller, clone_logits, awaited)
        launched.launch()
        return launched

    def _finish(self, jobs: list[Job], launched: Round) -> None:
        """Finishes a round. The jobs that go on stay in the order in which they began."""
        outcomes = zip(jobs, launched.finish(), strict=True)
        ended = [job for job, outcome in outcomes if outcome is not None and self._deliver(job, outcome)]
        self.scheduler.active = [job for job in self.scheduler.active if job not in ended]
        if time.monotonic() - self._last_sent_at > REPORT_SECONDS:  # the round only read a chunk
            self._report()

    def _settle(self) -> None:
        """Finishes the round that is launched, before jobs are taken out of line."""
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._finish(*launched)

    def _make_room(self) -> None:
        """Lets the jobs that came last wait while the KV caches have no room for a round of all."""
        if self.sessions.is_short:
            self.sessions.trim()
        if self.scheduler.is_crowded:
            self._settle()
        while self.scheduler.is_crowded:
            self.scheduler.hold_last()

    def _deliver(self, job: Job, outcome: Step | Exception) -> bool:
        """Sends what a round has brought to a job; returns whether the job has ended."""
        event: messages.TokenEvent | None = None
        error = outcome if isinstance(outcome, Exception) else None
        if isinstance(outcome, Step):
            try:
                event = job.event(outcome)
            except Exception as raised:
                error = raised
        ended = error is not None or (event is not None and event.finish is not None)
        if ended:
            self._end(job, failed=error is not None)
        if error is not None:
            self._send(failure(job.request, error))
        elif event is not None:
            self._send(event)
        return ended

    def _end(self, job: Job, failed: bool = False) -> None:
        """Ends a job that is no longer in line. Its session keeps the KV cache, unless the job has failed."""
        try:
            job.stream.close()
        except lost_device():
            raise
        except Exception as error:
            log.error("the drafter of request %s failed", job.id, exc_info=error)
            failed = True
        if failed:
            job.session.reset()
        self.sessions.release(job.session)
        if self._runtime.curve is not None:  # the job's steps have corrected it
            self.scheduler.max_active = max_active(self._settings, self._runtime.slots, self._runtime.curve)
        self._report()

    def _cancel(self, request_id: str) -> None:
        self._settle()
        if isinstance(entry := self.scheduler.remove(request_id), Job):
            self._end(entry)

    def _report(self) -> None:
        usage, running_usage = self.sessions.usage_ratio(), self.sessions.usage_ratio(with_idle=False)
        alone = self._runtime.runner.alone
        self._send(messages.Status(len(self.sessions), usage, running_usage, self.scheduler.max_active, alone))

    def _send(self, message: messages.FromWorker) -> None:
        self._last_sent_at = time.monotonic()
        self._wire.send(messages.encode(message))


def failure(request: messages.Request, error: Exception) -> messages.Failed:
    """The message for the client. An error that the client cannot fix is logged."""
    if isinstance(error, CLIENT_ERRORS):
        return messages.Failed(request.id, str(error), client_error=True)
    log.error("request %s failed", request.id, exc_info=error)
    if isinstance(error, (OutOfPages, *out_of_memory())):
        return messages.Failed(
            request.id, "There is not enough memory for this request; try again later or use a shorter context."
        )
    return messages.Failed(request.id, "The model failed on this request; see the server's log.")
