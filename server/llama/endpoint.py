"""POST /infill: the text between two others, as an editor asks for it at a keystroke."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fastapi import Request as HTTPRequest
from fastapi import Response

from outrider.server.chat.prompt import PromptEncoder
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.ignored import report_ignored
from outrider.server.llama.formatter import InfillFormatter
from outrider.server.llama.schema import InfillBody
from outrider.server.openai.generation import GenerationRunner, GenerationTask
from outrider.server.openai.requests import RequestBuilder

# A long prompt leaves room for this many tokens if the request sets no limit.
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class InfillEndpoint:
    """POST /infill."""

    prompts: PromptEncoder
    vocabulary: Vocabulary
    grammars: GrammarChecker
    requests: RequestBuilder
    runner: GenerationRunner

    async def create(self, http: HTTPRequest, body: InfillBody) -> Response:
        """Fills in the text. Raises APIError and EngineError."""
        arrived = time.monotonic()
        body = self.requests.named(body).model_copy(update={"session_id": session_of(body)})
        self.requests.check(body)
        context_tokens = (await self.requests.ready()).context_tokens
        answer_tokens = ANSWER_TOKENS if body.token_limit is None else max(1, body.token_limit)
        room = max(context_tokens // 2, context_tokens - answer_tokens)
        prompt = await self.prompts.fill_in(http.state.principal, body.text, context_tokens, room)
        tokens = self.vocabulary.grammar_tokens
        grammar, ignored = await self.grammars.grammar(body.structures, http.state.principal, special=tokens)
        requests = await self.requests.build(http, body, [prompt], grammar)
        stats: dict[str, float] = {}
        eos_ids = self.prompts.eos_ids.union(requests[0].stop_token_ids)
        formatter = InfillFormatter(body, requests[0], arrived, stats, eos_ids)
        task = GenerationTask(
            requests,
            formatter,
            arrived,
            choices=body.candidates,
            padded=body.pads_stream,
            new_stop=body.new_stop,
            stats=stats,
        )
        return report_ignored(http, await self.runner.respond(http, task, bool(body.stream)), ignored)


def session_of(body: InfillBody) -> str | None:
    """The name of the request's session: its own, or one for its slot; None if it names neither."""
    return body.session_id or (f"slot-{body.id_slot}" if body.id_slot is not None and body.id_slot >= 0 else None)
