"""POST /infill: the text between two others, as an editor asks for it at a keystroke.

Its answer is one object, or a stream of objects that ends with a `stop` and without [DONE].
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response

from outrider.server.engine.messages import Request
from outrider.server.http.ignored import report_ignored
from outrider.server.http.sse import ServerSentEvent
from outrider.server.llama.schema import InfillBody
from outrider.server.openai.completions import CompletionsEndpoint
from outrider.server.openai.generation import ChoiceOutput, Formatter, GenerationTask
from outrider.server.openai.usage import Usage

# A long prompt leaves room for this many tokens if the request sets no limit.
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class InfillEndpoint:
    completions: CompletionsEndpoint

    async def create(self, http: HTTPRequest, body: InfillBody) -> Response:
        """Fills in the text. Raises APIError and EngineError."""
        arrived, parts = time.monotonic(), self.completions
        body = parts.requests.named(body).model_copy(update={"session_id": body.session})
        parts.requests.check(body)
        context_tokens = (await parts.requests.ready()).context_tokens
        answer_tokens = ANSWER_TOKENS if body.token_limit is None else max(1, body.token_limit)
        room = max(context_tokens // 2, context_tokens - answer_tokens)
        prompt = await parts.prompts.fill_in(http.state.principal, body.text, context_tokens, room)
        requests, ignored = await parts.build(http, body, [prompt])
        stats: dict[str, float] = {}
        eos_ids = parts.prompts.eos_ids.union(requests[0].stop_token_ids)
        formatter = InfillFormatter(body, requests[0], arrived, stats, eos_ids)
        task = GenerationTask(
            requests, formatter, arrived, choices=body.candidates, padded=body.pads_stream, new_stop=body.new_stop, stats=stats
        )
        return report_ignored(http, await parts.runner.respond(http, task, bool(body.stream)), ignored)


@dataclass
class Progress:
    """The generated part of a choice."""

    last: ChoiceOutput
    tokens: int = 0
    has_new_line: bool = False


class InfillFormatter(Formatter):
    """Writes the answer to one /infill request."""

    def __init__(
        self, body: InfillBody, request: Request, arrived: float, stats: Mapping[str, float], eos_ids: Collection[int]
    ) -> None:
        """`stats` are those of the task that runs the request; `arrived` is time.monotonic()."""
        self._body = body
        self._request = request
        self._arrived = arrived
        self._stats = stats
        self._eos_ids = eos_ids
        self._progress: dict[int, Progress] = {}  # by choice

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> Any:
        for output in outputs:
            self._record(output)
        answers = [self._selected(self._final(each.index, each.text, each.tokens, usage)) for each in outputs]
        return answers if self._body.candidates > 1 else answers[0]

    def deltas(self, output: ChoiceOutput) -> list[ServerSentEvent]:
        self._record(output)
        return [ServerSentEvent(self._partial(output.index, output.text, output.tokens), padded=True)] if output.text else []

    def heartbeat(self) -> ServerSentEvent:
        return ServerSentEvent(self._partial(0, "", []), padded=True)

    def end(self, usage: Usage) -> list[ServerSentEvent]:
        return [ServerSentEvent(self._selected(self._final(index, "", [], usage))) for index in sorted(self._progress)]

    def _record(self, output: ChoiceOutput) -> None:
        progress = self._progress.setdefault(output.index, Progress(output))
        progress.tokens += len(output.tokens)
        progress.has_new_line = progress.has_new_line or "\n" in output.text
        progress.last = output

    def _partial(self, index: int, text: str, tokens: list[int]) -> dict[str, Any]:
        progress = self._progress.get(index)
        return {
            "index": index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1 if self._body.id_slot is None else self._body.id_slot,
            "tokens_predicted": progress.tokens if progress else 0,
            "tokens_evaluated": len(self._request.prompt),
        }

    def _final(self, index: int, text: str, tokens: list[int], usage: Usage) -> dict[str, Any]:
        progress = self._progress[index]
        return self._partial(index, text, tokens if self._body.return_tokens else []) | {
            "stop": True,
            "model": self._body.model,
            "has_new_line": progress.has_new_line,
            "truncated": False,
            "stop_type": self._stop_type(progress.last),
            "stopping_word": "",
            "tokens_cached": len(self._request.prompt) + progress.tokens,
            "timings": self._timings(progress.tokens, usage),
        }

    def _stop_type(self, last: ChoiceOutput) -> str:
        if last.finish != "stop":
            return "limit"
        ended = not self._body.stop_strings or (last.tokens[-1:] and last.tokens[-1] in self._eos_ids)
        return "eos" if ended else "word"

    def _timings(self, tokens: int, usage: Usage) -> dict[str, float]:
        """Times and counts of reading the prompt and of generating."""
        total_ms = 1e3 * (time.monotonic() - self._arrived)
        prompt_ms = min(total_ms, self._stats.get("first_token_ms", total_ms))
        read_tokens = len(self._request.prompt) - usage.cached_tokens
        return (
            {"cache_n": usage.cached_tokens}
            | rate("prompt", read_tokens, prompt_ms)
            | rate("predicted", tokens, total_ms - prompt_ms)
        )

    def _selected(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The requested fields; `a/b` is the field b of the object a, and keeps that name."""
        if self._body.response_fields is None:
            return answer
        flat = answer | {f"timings/{name}": value for name, value in answer["timings"].items()}
        return {name: flat[name] for name in self._body.response_fields if name in flat}


def rate(name: str, tokens: int, milliseconds: float) -> dict[str, float]:
    """The speed of a phase; fields begin with its name."""
    return {
        f"{name}_n": tokens,
        f"{name}_ms": round(milliseconds, 3),
        f"{name}_per_token_ms": round(milliseconds / max(1, tokens), 3),
        f"{name}_per_second": round(1e3 * tokens / max(1e-3, milliseconds), 3),
    }
