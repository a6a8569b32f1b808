"""/v1/completions: the endpoint, and the format of its answers."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response

from outrider.server.chat.fill_in import FillInText
from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import Request
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.openai.choices import ChoicesFormatter
from outrider.server.openai.generation import ChoiceOutput, GenerationRunner, GenerationTask
from outrider.server.openai.logprobs import CompletionLogprobs
from outrider.server.openai.requests import RequestBuilder, check_count
from outrider.server.openai.schema import CompletionBody, GenerationBody
from outrider.server.openai.usage import Usage

MAX_PROMPTS = 64


@dataclass(frozen=True)
class CompletionsEndpoint:
    """POST /v1/completions."""

    prompts: PromptEncoder
    vocabulary: Vocabulary
    grammars: GrammarChecker
    requests: RequestBuilder
    runner: GenerationRunner

    async def create(self, http: HTTPRequest, body: CompletionBody) -> Response:
        """Completes the prompts. Raises APIError and EngineError."""
        arrived = time.monotonic()
        body = self.requests.named(body)
        requests, ignored = await self.prepare(http, body)
        echoes = []
        if body.echo:
            context_tokens = (await self.requests.ready()).context_tokens
            echoes = [
                prompt if isinstance(prompt, str) else await self.prompts.decode(http.state.principal, prompt, context_tokens)
                for prompt in body.prompts
            ]
        formatter = CompletionFormatter(body, self.vocabulary, requests)
        task = GenerationTask(requests, formatter, arrived, choices=body.candidates, padded=body.pads_stream, echoes=echoes)
        return report_ignored(http, await self.runner.respond(http, task, bool(body.stream)), ignored)

    async def prepare(self, http: HTTPRequest, body: CompletionBody) -> tuple[list[Request], Sequence[str]]:
        """The requests of the body's prompts, and the names of what its grammar does not enforce. Raises APIError."""
        self.requests.check(body)
        check_count("prompt", len(body.prompts), MAX_PROMPTS, "prompts")
        if body.best_of is not None and (body.best_of < (body.n or 1) or body.stream):
            raise APIError(
                400,
                "'best_of' must be at least 'n', and cannot be streamed; raise it, and leave 'stream' out.",
                "best_of",
                "invalid_value",
            )
        principal, context_tokens = http.state.principal, (await self.requests.ready()).context_tokens
        if body.suffix:
            texts = [FillInText(prompt, body.suffix) for prompt in body.prompts]
            prompts = [await self.prompts.fill_in(principal, text, context_tokens) for text in texts]
        else:
            prompts = [await self.prompts.text(principal, prompt, context_tokens) for prompt in body.prompts]
        return await self.build(http, body, prompts)

    async def build(
        self, http: HTTPRequest, body: GenerationBody, prompts: Sequence[list[int]]
    ) -> tuple[list[Request], Sequence[str]]:
        """As `prepare`, of prompts that are encoded."""
        tokens = self.vocabulary.grammar_tokens
        grammar, ignored = await self.grammars.grammar(body.structures, http.state.principal, special=tokens)
        return await self.requests.build(http, body, prompts, grammar), ignored


class CompletionFormatter(ChoicesFormatter):
    """Writes completions and their chunks."""

    id_prefix = "cmpl-"
    body_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionBody, vocabulary: Vocabulary, requests: Sequence[Request]) -> None:
        """`requests`: one per candidate, all of the first prompt, then those of the next."""
        super().__init__(body, vocabulary, requests[0].id)
        self._requests = requests
        self._candidates, self._best_of = body.candidates, body.best_of
        self._returned = body.n or 1  # choices per prompt
        self._scores: dict[int, CompletionLogprobs] = {}  # by choice

    def body(self, outputs: Sequence[ChoiceOutput], usage: Usage) -> dict[str, Any]:
        if self._best_of is not None:
            outputs = best_outputs(outputs, self._best_of, self._returned)
        return super().body(outputs, usage)

    def choice_deltas(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        choices = []
        logprobs, extensions = self._logprobs(output), self._extensions(output)
        if output.text or logprobs or extensions:
            choices.append(choice(output.index, output.text, logprobs) | extensions)
        if output.finish is not None:
            choices.append(choice(output.index, finish_reason=output.finish))
        return choices

    def choice(self, output: ChoiceOutput) -> dict[str, Any]:
        return choice(output.index, output.text, self._logprobs(output), output.finish) | self._extensions(output)

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if output.logprobs is None or not self._request.returns_logprobs:
            return None
        if output.index not in self._scores:
            request = self._requests[output.index // self._returned * self._candidates]
            hidden = self._vocabulary.special_ids if request.skip_special_tokens else ()
            drops_space = self._vocabulary.drops_space(request.prompt, request.continues_prompt)
            self._scores[output.index] = CompletionLogprobs(self._vocabulary, hidden, drops_space)
        return self._scores[output.index].take(output)


def choice(
    index: int, text: str = "", logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def best_outputs(outputs: Sequence[ChoiceOutput], candidates: int, returned: int) -> list[ChoiceOutput]:
    """Keeps the `returned` most probable of each prompt's `candidates` (by mean log-probability), best first, renumbered."""
    best: list[ChoiceOutput] = []
    for start in range(0, len(outputs), candidates):
        ranked = sorted(outputs[start : start + candidates], key=lambda output: -output.mean_logprob)
        best += ranked[:returned]
    for index, output in enumerate(best):
        output.index = index
    return best
