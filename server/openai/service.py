"""What the endpoints do: check a request against the bounds, make the engine's requests of it, and answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from drafters.options import NEED_A_MODEL
from server.chat.prompt import PromptEncoder, Template
from server.chat.reasoning_parser import OPENING, ReasoningParser
from server.chat.structured_output import GrammarChecker
from server.chat.tool_parsers import ToolFormat, format_of, reader_of
from server.chat.vocabulary import Vocabulary
from server.engine import messages
from server.engine.engine import Engine, EngineError
from server.http.errors import APIError
from server.http.sse import exhausted, named_events, started, unless_gone
from server.openai.answers import Answerer, GenerationTask, Usage
from server.openai.conversation import NamedTool, joined
from server.openai.formatters import ChatFormatter, ChoiceOutput, CompletionFormatter, Formatter, logprob_entries
from server.openai.response_writer import ResponseWriter
from server.openai.responses import ResponsesBody, ResponseStore, Stored
from server.openai.schema import ChatBody, CompletionBody, GenerationBody, TokenizeBody
from server.settings import Settings
from server.telemetry.metrics import Metrics


class Service:
    """What the routes share."""

    def __init__(self, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.engine = Engine(settings, self.metrics)
        self.prompts = PromptEncoder(tokenizer)
        self.vocabulary = Vocabulary(tokenizer)
        self.grammars = GrammarChecker(settings.limits)
        chosen = settings.model.tool_format
        self.tool_format: ToolFormat = format_of(self.prompts.template) if chosen == "auto" else chosen
        self.responses = ResponseStore(settings.responses.capacity, settings.responses.ttl_seconds)
        self.answers = Answerer(self.engine, self.metrics, settings.server.coalesce_ms / 1e3)
        self.started = int(time.time())

    async def chat(self, http: Request, body: ChatBody) -> Response:
        """POST /v1/chat/completions."""
        arrived = time.monotonic()
        requests = await self._chat_requests(http, body)
        shape = ChatFormatter(self.vocabulary, self._reader(body, requests[0].prompt), isinstance(body.tool_choice, NamedTool))
        return await self._answer(http, body, requests, shape, arrived)

    async def _chat_requests(self, http: Request, body: ChatBody) -> list[messages.Request]:
        """What the engine is asked for in a chat. Raises APIError."""
        self._check(body)
        if len(body.messages) > self.settings.limits.messages:
            raise APIError(400, f"At most {self.settings.limits.messages} messages are allowed.", "messages", "too_many")
        if body.top_logprobs is not None and not body.logprobs:
            raise APIError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        rendered = [message.rendered() for message in body.messages]
        prompt = await self.prompts.chat(rendered, self._template(body))
        forced = await self.grammars.calls(body, self.tool_format, self.vocabulary.special)
        return await self._requests(http, body, [prompt], body.n or 1, body.token_limit, forced)

    async def respond(self, http: Request, body: ResponsesBody) -> Response:
        """POST /v1/responses."""
        arrived = time.monotonic()
        identity, principal = f"resp_{uuid.uuid4().hex}", http.state.principal
        before = None
        if body.previous_response_id is not None:
            before = self.responses.get(body.previous_response_id, principal, "previous_response_id")
        root = before.root if before else identity
        try:
            chat = body.chat(before.messages if before else [], root)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        requests = await self._chat_requests(http, chat)
        writer = ResponseWriter(body, identity, self._reader(chat, requests[0].prompt)())
        shape = ChatFormatter(self.vocabulary)
        asked = GenerationTask(
            identity, body.model, shape, requests, arrived, logprobs=chat.shows_logprobs, obfuscates=chat.obfuscates
        )
        http.state.spent = asked.spent

        def keep() -> None:
            if body.store is not False:
                said = chat.messages[body.instructions is not None :]  # instructions are for one response only
                self.responses.put(Stored(principal, writer.response, [*said, *writer.messages], root))

        events = self._response_events(asked, writer, keep)
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            chunks = await unless_gone(http, started(named_events(events, self.answers.padding(asked))))
            if chunks is None:
                return Response(status_code=499)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        whole = await unless_gone(http, exhausted(events))
        if whole is None:
            return Response(status_code=499)
        if writer.response["status"] == "failed":
            raise APIError(500, writer.response["error"]["message"], code="internal_error")
        return JSONResponse(writer.response)

    async def _response_events(
        self, asked: GenerationTask, writer: ResponseWriter, keep: Callable[[], None]
    ) -> AsyncGenerator[dict[str, Any] | None, None]:
        """A response's events; None = nothing for the keep-alive time."""
        usage, finish = Usage(), None
        for event in writer.begin():
            yield event
        try:
            async with aclosing(self.answers.batches(asked, usage)) as batches:
                async for batch in batches:
                    if not batch:
                        yield None
                        continue
                    piece = ChoiceOutput(0)
                    for token in batch:
                        piece.add(token)
                    finish = piece.finish
                    for event in writer.take(piece.text, logprob_entries(self.vocabulary, asked.shown(piece))):
                        yield event
        except EngineError as error:
            if asked.requests and usage.steps == 0:
                raise
            for event in writer.fail(str(error)):
                yield event
            return
        last = writer.end(finish, usage.response_body())
        keep()
        for event in last:
            yield event

    def _reader(self, body: ChatBody, prompt: list[int]) -> Callable[[], ReasoningParser]:
        """What reads the answers to a prompt."""
        reasons = OPENING in self.prompts.template
        reasoning = reasons and not body.forced_tools and self.prompts.ends_with(prompt, OPENING)

        def reader() -> ReasoningParser:
            return ReasoningParser(reader_of(self.tool_format) if body.usable_tools else None, reasons, reasoning)

        return reader

    def _template(self, body: ChatBody) -> Template:
        """What the request asks of the chat template. Raises APIError."""
        wanted = dict(body.chat_template_kwargs or {})
        unknown = sorted(set(wanted) - set(self.settings.limits.template_arguments))
        if unknown:
            allowed = ", ".join(self.settings.limits.template_arguments)
            message = f"'chat_template_kwargs' may hold {allowed}, not {unknown[0]!r}."
            raise APIError(400, message, "chat_template_kwargs", "invalid_value")
        if body.reasoning_effort is not None:
            wanted["reasoning_effort"] = body.reasoning_effort
        going_on = bool(body.continue_final_message)
        opened = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
        if going_on and (opened or body.messages[-1].role != "assistant"):
            message = "'continue_final_message' needs a last message of the assistant, and no 'add_generation_prompt'."
            raise APIError(400, message, "continue_final_message", "invalid_value")
        return Template(wanted, opened, going_on, [tool.model_dump(exclude_none=True) for tool in body.usable_tools])

    async def complete(self, http: Request, body: CompletionBody) -> Response:
        """POST /v1/completions."""
        arrived = time.monotonic()
        self._check(body)
        if len(body.prompts) > self.settings.limits.prompts:
            raise APIError(400, f"At most {self.settings.limits.prompts} prompts are allowed.", "prompt", "too_many")
        best = None
        if body.best_of is not None:
            if body.best_of < (body.n or 1) or body.stream:
                message = "'best_of' must be at least 'n', and cannot be streamed."
                raise APIError(400, message, "best_of", "invalid_value")
            best = body.n or 1
        if body.suffix:
            prompts = [await self.prompts.fill_in(prompt, body.suffix) for prompt in body.prompts]
        else:
            prompts = [await self.prompts.text(prompt) for prompt in body.prompts]
        echoes = [await self.prompts.decode(prompt) for prompt in body.prompts] if body.echo else []
        requests = await self._requests(http, body, prompts, body.candidates, body.token_limit)
        return await self._answer(http, body, requests, CompletionFormatter(self.vocabulary), arrived, best, echoes)

    def _check(self, body: GenerationBody) -> None:
        """The bounds that the settings give. Raises APIError."""
        limits, served = self.settings.limits, self.settings.model.served_name
        if body.model != served:
            message = f"The model {body.model!r} does not exist here; this server serves {served!r}."
            raise APIError(404, message, "model", "model_not_found")
        wanted = body.speculation and body.speculation.drafter
        if wanted in NEED_A_MODEL and self.settings.draft_model.path is None:
            message = f"The drafter {wanted!r} needs a draft model, and this server has none; choose another drafter."
            raise APIError(400, message, "speculation", "no_draft_model")
        for name in ("n", "best_of"):
            count = getattr(body, name, None) or 1
            if count > limits.choices:
                message = f"'{name}' is {count}, but at most {limits.choices} choices are allowed."
                raise APIError(400, message, name, "too_many")
        if len(body.stops) > limits.stop_strings:
            message = f"'stop' has {len(body.stops)} strings, but at most {limits.stop_strings} are allowed."
            raise APIError(400, message, "stop", "too_many")
        if any(len(stop) > limits.stop_characters for stop in body.stops):
            raise APIError(400, f"A stop string may have at most {limits.stop_characters} characters.", "stop", "too_long")
        if len(body.logit_bias or {}) > limits.logit_biases:
            message = f"'logit_bias' has {len(body.logit_bias or {})} tokens, but at most {limits.logit_biases} are allowed."
            raise APIError(400, message, "logit_bias", "too_many")
        named = {"logit_bias": map(int, body.logit_bias or {}), "stop_token_ids": body.stop_token_ids or []}
        for name, tokens in named.items():
            wrong = next((token for token in tokens if token >= self.prompts.size), None)
            if wrong is not None:
                message = f"Invalid '{name}': token ids must be from 0 to {self.prompts.size - 1}, not {wrong}."
                raise APIError(400, message, name, "invalid_value")

    async def _answer(
        self,
        http: Request,
        body: GenerationBody,
        requests: list[messages.Request],
        shape: Formatter,
        arrived: float,
        best: int | None = None,
        echoes: Sequence[str] = (),
    ) -> Response:
        asked = GenerationTask(
            id=shape.prefix + requests[0].id.rpartition("-")[0],
            model=self.settings.model.served_name,
            shape=shape,
            requests=requests,
            include_usage=body.include_usage,
            report=bool(body.speculation and body.speculation.report),
            arrived=arrived,
            best=best,
            echoes=echoes,
            token_ids=bool(body.return_token_ids),
            logprobs=body.shows_logprobs,
            obfuscates=body.obfuscates,
        )
        http.state.spent = asked.spent
        if body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            chunks = await unless_gone(http, started(self.answers.stream(asked)))
            if chunks is None:
                return Response(status_code=499)
            return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
        whole = await unless_gone(http, self.answers.whole(asked))
        return Response(status_code=499) if whole is None else JSONResponse(whole)

    async def _requests(
        self,
        http: Request,
        body: GenerationBody,
        prompts: list[list[int]],
        choices: int,
        limit: int | None,
        forced: str | None = None,
    ) -> list[messages.Request]:
        """What the engine is asked for. Raises APIError."""
        context = (await self.engine.wait_started()).context_tokens
        for prompt in prompts:
            if not prompt:
                raise APIError(400, "The prompt is empty; give at least one token.", "prompt", "invalid_value")
            if len(prompt) >= context:
                message = f"The prompt has {len(prompt)} tokens, but this model's context holds {context}; shorten the prompt."
                raise APIError(400, message, "prompt", "context_length_exceeded")
        session = body.session_id or http.headers.get("x-session-id") or body.prompt_cache_key
        speculation = body.speculation
        prediction = await self.prompts.plain(joined(body.prediction.content)) if body.prediction else []
        grammar = forced or await self.grammars.grammar(body)
        calls = isinstance(body, ChatBody) and bool(body.usable_tools)  # their markers may be special tokens
        identity = uuid.uuid4().hex
        return [
            messages.Request(
                id=f"{identity}-{number}",
                prompt=prompt,
                # What a grammar leaves out of a draft was drawn, too: such a draft is no sample any more.
                params=body.sampling if grammar is None else replace(body.sampling, rule="keyed"),
                max_tokens=min(context if limit is None else limit, context - len(prompt)),
                stop=body.stops,
                choices=choices,
                principal=http.state.principal,
                session=session[:256] if session else None,
                drafter=speculation.drafter if speculation else None,
                max_nodes=speculation.max_nodes if speculation else None,
                prediction=prediction[:context],
                stop_token_ids=body.stop_token_ids or [],
                skip_special_tokens=not calls if body.skip_special_tokens is None else body.skip_special_tokens,
                priority=body.priority or 0,
                grammar=grammar,
                keep_stop=bool(body.include_stop_str_in_output),
                scores_prompt=body.scores_prompt,
            )
            for number, prompt in enumerate(prompts)
        ]

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """POST /tokenize: the ids of a text, or of a conversation as the model reads it."""
        if body.messages is not None:
            tokens = await self.prompts.chat([message.rendered() for message in body.messages], Template())
        else:
            tokens = await self.prompts.text(body.prompt or "")
        return {"tokens": tokens, "count": len(tokens), "max_model_len": (await self.engine.wait_started()).context_tokens}

    def card(self) -> dict[str, Any]:
        """The served model as /v1/models lists it."""
        return {"id": self.settings.model.served_name, "object": "model", "created": self.started, "owned_by": "outrider"}
