"""A round: one forward for the steps of several streams, and for chunks of prompts.

Every stream drafts, the nodes of all drafts share the round's time, one forward computes the rows of all, and each stream
accepts its own. An error of one stream does not disturb the others.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from outrider.verify.budget import Draft
from outrider.verify.controller import Controller, Plan, Times
from outrider.verify.cost import Touched, kinds_of_step
from outrider.verify.errors import lost_device
from outrider.verify.sampling.rows import Logits, copies, together
from outrider.verify.stream import Part, Step, StepPart, Stream
from outrider.verify.verifier import Judgement

log = logging.getLogger("outrider.worker")
# The oldest prompt gets at least one in this many tokens of a chunk.
OLDEST_SHARE = 4
T = TypeVar("T")

# A Step, the exception that ends the stream, or None: the prompt got no tokens this round.
Outcome = Step | Exception | None


class Round:
    """One round of streams of the same model: `launch`, then `finish`.

    Between the two calls the device computes, and the caller may finish and launch rounds of other streams. A caller that makes
    one call after the other, as `run_round` does, overlaps nothing.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        controller: Controller | None = None,
        clone_logits: bool = False,
        awaited: Mapping[Stream, Collection[int]] | None = None,
    ) -> None:
        """`streams` are in order of arrival, by which `divide` shares what `controller` plans to read of prompts.

        With `clone_logits`, another round may be launched before `finish`. `awaited` are the numbers of a stream's rows that
        other requests wait for.
        """
        self._streams = streams
        self._awaited = awaited or {}
        self._controller = controller or Controller()
        self._clone_logits = clone_logits
        self._outcomes: dict[Stream, Outcome] = {}
        self._parts: dict[Stream, Part] = {}  # the forward's parts
        self._rows: dict[Stream, Logits] | None = None  # the logits of each part; None if the forward has failed
        self._judgements: dict[Stream, Judgement] = {}  # of steps
        self._plan = Plan([])
        self._reads_plan = True  # whether the prompts have as many tokens as planned
        self._launched_at = 0.0  # time.perf_counter() at the forward's start
        self._launch_seconds = 0.0  # seconds of drafting and of choosing nodes
        self._device_seconds = 0.0  # seconds from the forward's start to the first stream's verdict

    def launch(self) -> None:
        """Schedules, drafts, chooses nodes and starts the forward and its judgement. Raises `lost_device`.

        What the host will wait for is queued behind this forward, so that the next one delays nothing.
        """
        started = time.perf_counter()
        readers = [stream for stream in self._streams if stream.verifier.unread_prompt]
        drafts = self._draft([stream for stream in self._streams if not stream.verifier.unread_prompt])
        read_tokens = max((reader.read_tokens for reader in readers), default=None)
        self._plan = self._controller.plan(list(drafts.values()), [stream.budget for stream in drafts], read_tokens)
        log.debug("round: %s", self._plan)
        choices = dict(zip(drafts, self._plan.choices, strict=True))
        steps = self._each(choices, lambda stream: stream.rows(drafts[stream], choices[stream]))
        parts: dict[Stream, Part] = {**steps, **self._read(readers)}
        self._parts = {stream: parts[stream] for stream in self._streams if stream in parts}
        self._launched_at = time.perf_counter()
        self._launch_seconds = self._launched_at - started
        if (rows := self._forward()) is not None and self._judge(rows):
            self._rows = rows

    def finish(self) -> list[Outcome]:
        """Waits for the forward and commits what it computed. Returns each stream's outcome. Raises `lost_device`."""
        if self._rows is None:
            for stream, part in self._parts.items():
                self._compute_alone(stream, part)
        else:
            forward_seconds = time.perf_counter() - self._launched_at
            for stream, part in self._parts.items():
                self._commit(stream, part, self._rows[stream], forward_seconds)
                if isinstance(part, StepPart) and not self._device_seconds:  # chunks do not wait for the device
                    self._device_seconds = time.perf_counter() - self._launched_at
        self._measure(time.perf_counter() - self._launched_at)
        return [self._outcomes.get(stream) for stream in self._streams]

    def _draft(self, streams: Sequence[Stream]) -> dict[Stream, Draft]:
        drafts: dict[Stream, Draft] = {}
        for stream in streams:
            if not stream.remaining:
                self._outcomes[stream] = Step([], "length")
            elif (found := self._attempt(stream, stream.draft)) is not None:
                drafts[stream] = found
        return drafts

    def _read(self, readers: Sequence[Stream]) -> dict[Stream, Part]:
        """Chunks of prompts, as many tokens in all as planned, if they have as many."""
        parts: dict[Stream, Part] = {}
        shares = divide(self._plan.chunk_tokens, [self._goals(reader) for reader in readers])
        spare = self._plan.chunk_tokens - sum(shares)
        for reader, share in zip(readers, shares, strict=True):
            spare += share
            if spare > 0 and (part := self._attempt(reader, partial(reader.chunk, spare))) is not None:
                parts[reader] = part
                spare -= part.segment.rows  # fewer than its share at a picture's start; a whole picture may be more
        self._reads_plan = spare <= 0
        return parts

    def _goals(self, reader: Stream) -> list[int]:
        """The numbers of tokens of a prompt after which a request can go on, as `divide` takes them."""
        others = (rows - reader.verifier.cache.length for rows in self._awaited.get(reader, ()))
        return [reader.verifier.unread_prompt, *(tokens for tokens in others if 0 < tokens < reader.verifier.unread_prompt)]

    def _forward(self) -> dict[Stream, Logits] | None:
        """The logits of all parts by one forward, which a device may still be computing; None if it failed."""
        if not self._parts:
            return {}
        try:
            runner = self._streams[0].verifier.runner
            logits = runner.forward_all([part.segment for part in self._parts.values()])
        except lost_device():
            raise
        except Exception:
            return None  # one stream's rows may be the reason
        return dict(zip(self._parts, copies(logits) if self._clone_logits else logits, strict=True))

    def _judge(self, rows: Mapping[Stream, Logits]) -> bool:
        """Starts to judge all steps together; False if that failed, for which one stream's rows may be the reason."""
        steps = {stream: part for stream, part in self._parts.items() if isinstance(part, StepPart)}
        try:
            decisions = together([*rows.values()])
            self._judgements = self._each(steps, lambda stream: stream.judge(steps[stream], rows[stream], decisions))
            if decisions is not None:
                decisions.end()
        except lost_device():
            raise
        except Exception:
            return False
        return True

    def _compute_alone(self, stream: Stream, part: Part) -> None:
        """Commits a part after a forward of its own, whose error ends this stream only."""
        started = time.perf_counter()
        rows = self._attempt(stream, lambda: stream.verifier.runner.forward_all([part.segment])[0])
        if rows is None:
            return
        if isinstance(part, StepPart):
            self._judgements |= self._each([stream], lambda _: stream.judge(part, rows))
        self._commit(stream, part, rows, time.perf_counter() - started)

    def _commit(self, stream: Stream, part: Part, rows: Logits, forward_seconds: float) -> None:
        """Ends a stream's part of the round, unless its judgement has failed."""
        if not isinstance(part, StepPart):
            outcome = self._attempt(stream, lambda: stream.commit_chunk(part, rows))
        elif stream in self._judgements:
            outcome = self._attempt(stream, lambda: stream.accept(part, self._judgements[stream], forward_seconds))
        else:
            return
        if outcome is not None:
            self._outcomes[stream] = outcome

    def _each(self, streams: Iterable[Stream], phase: Callable[[Stream], T]) -> dict[Stream, T]:
        """The results of a phase by stream, without the streams that failed in it."""
        found = {stream: self._attempt(stream, partial(phase, stream)) for stream in streams}
        return {stream: result for stream, result in found.items() if result is not None}

    def _attempt(self, stream: Stream, work: Callable[[], T]) -> T | None:
        """The result of `work`, or None after an error, which is the stream's outcome."""
        try:
            return work()
        except lost_device():
            raise  # only a new process can use the device again
        except Exception as error:
            self._outcomes[stream] = error
            return None

    def _measure(self, seconds: float) -> None:
        """Reports what the round took, unless another one overlapped it. `seconds` run from the forward's start to the end."""
        if self._rows is None:
            return
        rows = sum(part.segment.rows for part in self._parts.values())
        steps = {stream: part for stream, part in self._parts.items() if isinstance(part, StepPart)}
        if rows and not steps and self._reads_plan:  # a short chunk would show what a round costs, not a token
            self._controller.record_reading(rows, seconds)
        if not steps or self._clone_logits or not self._reads_plan:
            return
        found = [outcome for stream in steps if isinstance(outcome := self._outcomes[stream], Step)]
        is_complete = len(found) == len(self._plan.choices)
        forward = seconds - sum(step.commit_seconds for step in found) if is_complete else None
        host = self._launch_seconds + seconds - self._device_seconds
        experts = self._streams[0].verifier.runner.touched  # of the forward whose verdicts are known now
        touched = Touched(kinds_of_step([part.tree for part in steps.values()]), experts) if experts else None
        self._controller.record(self._plan, rows, Times(host, self._device_seconds, forward), touched)


def run_round(streams: Sequence[Stream], controller: Controller | None = None) -> list[Outcome]:
    """Runs a round from its start to its end, and overlaps nothing. Raises `lost_device`."""
    started = Round(streams, controller)
    started.launch()
    return started.finish()


def divide(tokens: int, prompts: Sequence[Collection[int]]) -> list[int]:
    """How many of a chunk's `tokens` each prompt gets, in order of arrival: the one with the fewest left goes first.

    The oldest gets its share of every chunk, so that every prompt is read in time, however many shorter ones come.

    A prompt is given by the numbers of tokens after which a request can go on: the number that it has left, and smaller ones
    if other requests wait for its beginning. All tokens are given away if the prompts have as many.
    """
    given = [0] * len(prompts)
    if prompts:
        given[0] = min(max(prompts[0]), -(-tokens // OLDEST_SHARE))
    left = tokens - sum(given)
    for goal, number in sorted((goal, number) for number, goals in enumerate(prompts) for goal in goals):
        more = min(left, max(0, goal - given[number]))
        given[number] += more
        left -= more
    return given
