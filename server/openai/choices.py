"""The format that chats and completions share: an envelope around `choices`."""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, ClassVar

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import StepReport, StepTrace
from outrider.server.http.sse import DONE, ServerSentEvent
from outrider.server.openai.generation import ChoiceOutput, Formatter
from outrider.server.openai.schema import GenerationBody
from outrider.server.openai.usage import Usage

FINGERPRINT = f"outrider-{version('outrider')}"


class ChoicesFormatter(Formatter, ABC):
    """Bodies and chunks that have `choices`, which subclasses write."""

    id_prefix: ClassVar[str]
    body_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: GenerationBody, vocabulary: Vocabulary, request_id: str) -> None:
        """The answer's id is the id of its first engine request without the prompt's number, as in the worker's log."""
        self._request = request
        self._vocabulary = vocabulary
        self._id = self.id_prefix + request_id.rpartition("-")[0]
        self._created = int(time.time())
        self._opened: set[int] = set()  # choices that have started to stream

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning in the choices written so far."""
        return 0

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a first chunk without output; None = no such chunk."""
        return None

    @abstractmethod
    def choice_deltas(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        """The choices of the chunks for new output, one chunk each."""

    @abstractmethod
    def choice(self, output: ChoiceOutput) -> dict[str, Any]:
        """A complete choice."""

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        choices = [self.choice(output) for output in outputs]
        body = self._envelope(self.body_object) | {"choices": choices, "usage": usage.completion_body(self.reasoning_tokens)}
        return self._with_report(body, usage)

    def start(self) -> list[ServerSentEvent]:
        return self._open(0)

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        return self._open(output.index) + [
            ServerSentEvent(self._chunk(choice), padded=True) for choice in self.choice_deltas(output)
        ]

    def _open(self, index: int) -> list[ServerSentEvent]:
        """The first chunk of a choice, unless it has been written."""
        opening = None if index in self._opened else self.opening(index)
        self._opened.add(index)
        return [] if opening is None else [ServerSentEvent(self._chunk(opening))]

    def heartbeat(self) -> ServerSentEvent:
        return ServerSentEvent(self._chunk(), padded=True)

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        last = self._chunk()
        if self._request.includes_usage:
            last["usage"] = usage.completion_body(self.reasoning_tokens)
        has_last = self._request.includes_usage or self._request.reports_speculation
        return [ServerSentEvent(self._with_report(last, usage)), DONE] if has_last else [DONE]

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": FINGERPRINT,
        }

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        # With `include_usage`, all chunks but the last have a null `usage`.
        usage = {"usage": None} if self._request.includes_usage else {}
        return self._envelope(self.chunk_object) | usage | {"choices": list(choices)}

    def _with_report(self, body: dict[str, Any], usage: Usage) -> dict[str, Any]:
        return body | {"speculation": usage.speculation_body()} if self._request.reports_speculation else body

    def _extensions(self, output: ChoiceOutput) -> dict[str, Any]:
        """The fields `token_ids`, without the echoed prompt, and `trace`, as far as the client requested them."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["token_ids"] = output.tokens[output.echoed_tokens :]
        if output.step is not None and output.step.trace is not None:
            fields["trace"] = trace_body(self._vocabulary, output.step, output.step.trace)
        return fields


def trace_body(vocabulary: Vocabulary, step: StepReport, trace: StepTrace) -> dict[str, Any]:
    """The draft of one step. Its size is bounded by the draft, which has at most MAX_NODES nodes."""
    bonus = trace.bonus
    return {
        "draft": {
            "tokens": trace.tokens,
            "texts": [vocabulary.text_of(token) for token in trace.tokens],
            "parents": trace.parents,
            "probabilities": [round(value, 4) for value in trace.probability],
            "sources": trace.sources,
        },
        "accepted": trace.accepted,
        "bonus": None if bonus is None else {"token": bonus, "text": vocabulary.text_of(bonus)},
        "proposed": trace.proposed,
        "expected_tokens": None if trace.expected is None else round(trace.expected, 3),
        "gain": round(trace.gain, 3),
        "draft_ms": milliseconds(step.draft_seconds),
        "verify_ms": milliseconds(step.verify_seconds),
        "commit_ms": milliseconds(step.commit_seconds),
    }


def milliseconds(seconds: float) -> float:
    """The time in milliseconds, to the microsecond."""
    return round(1e3 * seconds, 3)
