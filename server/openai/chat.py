"""/v1/chat/completions: the endpoint, and the format of its answers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response

from outrider.server.chat.media import PICTURES
from outrider.server.chat.prompt import PromptEncoder, TemplateOptions
from outrider.server.chat.reasoning_parser import THINK, ReasoningParser, detect_reasoning
from outrider.server.chat.response_template import EXAMPLE, derive_reasoning, derive_tools
from outrider.server.chat.structured_output import Enforced, GrammarChecker
from outrider.server.chat.tools import FORMATS, Part, ToolFormat, ToolParser, detect_format, tool_parser, with_model_ids
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import PictureInput, Request
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn
from outrider.server.openai.choices import ChoicesFormatter
from outrider.server.openai.generation import ChoiceOutput, GenerationRunner, GenerationTask, Stop
from outrider.server.openai.logprobs import content_logprobs
from outrider.server.openai.output_parser import OutputParser, SingleCallParser, SingleCallStop
from outrider.server.openai.requests import RequestBuilder, check_count
from outrider.server.openai.schema import ChatBody
from outrider.server.openai.tools.custom_input import CustomPart
from outrider.server.pictures.service import NO_PICTURES, PictureService
from outrider.server.settings import Settings
from outrider.verify.sampling_params import ReasoningLimit

log = logging.getLogger("outrider")
MAX_MESSAGES = 2048


@dataclass(frozen=True)
class EncodedChat:
    """The prompt of a chat."""

    tokens: list[int]
    pictures: list[PictureInput]
    reads_pictures: bool  # whether the model reads all pictures of the chat

    def ignored(self, names: Sequence[str]) -> list[str]:
        """What a request's body names as left out, without the pictures that the model reads."""
        return [name for name in names if not (self.reads_pictures and name.rpartition(".")[2] in PICTURES)]


@dataclass(frozen=True)
class PreparedChat:
    """A chat that is ready to run."""

    requests: list[Request]
    prompt: EncodedChat
    new_parser: Callable[[], ToolParser]  # a parser for one choice
    new_stop: Callable[[], Stop] | None = None  # what ends a choice early
    unenforced: Sequence[str] = ()  # names of what the grammar leaves to the model

    def ignored(self, names: Sequence[str]) -> list[str]:
        """What a request's body names as left out, as `EncodedChat.ignored`, and what is not enforced."""
        return [*self.prompt.ignored(names), *self.unenforced]


class ChatEndpoint:
    """POST /v1/chat/completions. Endpoints whose bodies convert to chats use `prepare`."""

    def __init__(
        self,
        settings: Settings,
        prompts: PromptEncoder,
        vocabulary: Vocabulary,
        grammars: GrammarChecker,
        requests: RequestBuilder,
        runner: GenerationRunner,
        pictures: PictureService,
    ) -> None:
        self._pictures = pictures
        self._limits = settings.limits
        self._prompts = prompts
        self._vocabulary = vocabulary
        self._grammars = grammars
        self._requests = requests
        self._runner = runner
        configured = settings.model.tool_format
        self._tool_format = tool_format_of(prompts) if configured == "auto" else FORMATS[configured]
        if self._tool_format is None:
            log.warning("the chat template's format of tool calls is unknown, so calls are content; set model.tool_format")
        self._reasoning = detect_reasoning(prompts.template) or derive_reasoning(prompts.response_template)
        markers = self._reasoning or THINK
        self._reasoning_tokens = prompts.token(markers.opening), prompts.token(markers.closing)

    @property
    def capabilities(self) -> list[str]:
        """What the model can do on this server, as its card names it."""
        known = {
            "chat": bool(self._prompts.template),
            "tools": self._tool_format is not None,
            "reasoning": self._reasoning is not None,
            "structured_outputs": True,
            "fill_in": self._prompts.fills_in,
        }
        return [name for name, has in known.items() if has]

    async def create(self, http: HTTPRequest, body: ChatBody) -> Response:
        """Answers a chat. Raises APIError and EngineError."""
        arrived = time.monotonic()
        chat = await self.prepare(http, body)
        formatter = ChatFormatter(body, self._vocabulary, chat.new_parser, chat.requests[0].id)
        task = GenerationTask(
            chat.requests, formatter, arrived, choices=body.candidates, padded=body.pads_stream, new_stop=chat.new_stop
        )
        return report_ignored(http, await self._runner.respond(http, task, bool(body.stream)), chat.ignored(body.ignored))

    async def prepare(self, http: HTTPRequest, body: ChatBody) -> PreparedChat:
        """Checks the body, renders and encodes its prompt, and compiles its grammar. Raises APIError."""
        prompt = await self.encode(http, body)
        opened = self._reasoning is not None and self._prompts.ends_with(prompt.tokens, self._reasoning.opening)
        grammar, unenforced = await self._grammar(http, body, opened)
        limit = self._reasoning_limit(body, opened)
        hides = self._hides_markers(body)
        requests = await self._requests.build(http, body, [prompt.tokens], grammar, limit, hides, prompt.pictures)
        new_parser = partial(self._new_parser, body, opened)
        if body.parallel_tool_calls is False and body.enabled_tools and not body.required_tools:  # else the grammar allows one
            parser, stop = lambda: SingleCallParser(new_parser()), lambda: SingleCallStop(new_parser())
            return PreparedChat(requests, prompt, parser, stop, unenforced)
        return PreparedChat(requests, prompt, new_parser, None, unenforced)

    def _new_parser(self, body: ChatBody, opened: bool) -> ReasoningParser:
        """A parser for one choice. `opened`: the prompt has opened the reasoning."""
        functions = {tool.function.name: tool.function.parameters for tool in body.enabled_tools}
        format, tools = self._format_of(body), None
        if self._reasoning is not None and self._reasoning.channels:
            return ReasoningParser(tool_parser("harmony", functions))
        if functions and format is not None:
            tools = tool_parser(format, functions)
        return ReasoningParser(tools, self._reasoning is not None, opened, self._reasoning or THINK)

    def _format_of(self, body: ChatBody) -> ToolFormat | None:
        """The format of the calls: the model's, or any that can be enforced if the model's is unknown."""
        return FORMATS["hermes"] if self._tool_format is None and body.required_tools else self._tool_format

    async def encode(self, http: HTTPRequest, body: ChatBody) -> EncodedChat:
        """Checks the body, and returns its prompt. Raises APIError and EngineError."""
        self._requests.check(body)
        check_count("messages", len(body.messages), MAX_MESSAGES, "messages")
        if body.top_logprobs is not None and not body.logprobs:
            raise APIError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        ready = await self._requests.ready()
        has_pictures = any(message.picture_count for message in body.messages)
        reads = has_pictures and ready.reads_pictures and await self._pictures.is_available()
        roles = self._prompts.picture_roles if reads else frozenset[str]()
        urls = [url for message in body.messages if message.role in roles for url in message.picture_urls]
        messages, options = await in_turn(http, lambda: (self._rendered(body, roles), self._template_options(body)))
        pictures = await self._pictures.prepare(urls) if urls else NO_PICTURES
        tokens = await self._prompts.chat(http.state.principal, messages, options, ready.context_tokens, pictures)
        if not urls:
            return EncodedChat(tokens, [], False)
        placed = self._pictures.place(tokens, pictures.prepared, self._prompts.rare_ids)
        return EncodedChat(*placed, len(urls) == sum(message.picture_count for message in body.messages))

    def _rendered(self, body: ChatBody, picture_roles: Collection[str]) -> list[dict[str, Any]]:
        """The messages as the chat template takes them, with the pictures of these roles."""
        messages = [message.rendered(message.role in picture_roles) for message in body.messages]
        return messages if self._tool_format is None else with_model_ids(messages, self._tool_format.call_id)

    def _reasoning_limit(self, body: ChatBody, is_open: bool) -> ReasoningLimit | None:
        """The limit of the reasoning. None if the request has none, or the markers of reasoning are not tokens of the model."""
        opening, closing = self._reasoning_tokens
        if body.thinking_token_budget is None or closing is None or (opening is None and not is_open):
            return None
        return ReasoningLimit(body.thinking_token_budget, closing, None if is_open else opening)

    def _hides_markers(self, body: ChatBody) -> bool:
        """Whether markers of reasoning would be missing in the text, though the request does not ask for that."""
        if self._reasoning is None or body.skip_special_tokens is not None or not body.hides_special_tokens:
            return False
        return any(token in self._reasoning.opening + self._reasoning.closing for token in self._vocabulary.special)

    async def _grammar(self, http: HTTPRequest, body: ChatBody, opened: bool) -> Enforced:
        """The grammar that the answer follows, after the reasoning if the prompt has opened it. Raises APIError."""
        prefix, format = "", self._format_of(body)
        if self._reasoning is not None and opened:
            prefix = self._reasoning.prefix(self._vocabulary.grammar_tokens, calls=bool(body.required_tools))
        if not body.required_tools or format is None:
            return await self._grammars.grammar(body.structures, http.state.principal, prefix)
        functions = {tool.function.name: tool.function.parameters for tool in body.required_tools}
        single = body.parallel_tool_calls is False or body.named_tool is not None
        tokens, principal, strict = self._vocabulary.grammar_tokens, http.state.principal, body.strict_tools
        return await self._grammars.tool_calls(
            functions, format, tokens, single, principal, prefix, body.required_inputs, strict
        )

    def _template_options(self, body: ChatBody) -> TemplateOptions:
        """The request's options of the chat template. Raises APIError."""
        arguments = dict(body.chat_template_kwargs or {})
        unknown = sorted(set(arguments) - set(self._limits.template_arguments))
        if unknown:
            allowed = ", ".join(self._limits.template_arguments)
            message = f"'chat_template_kwargs' may contain {allowed}, not {unknown[0]!r}."
            raise APIError(400, message, "chat_template_kwargs", "invalid_value")
        if body.reasoning_effort is not None:
            arguments["reasoning_effort"] = body.reasoning_effort
        continues = bool(body.continue_final_message)
        adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        if continues and (adds_prompt or body.messages[-1].role != "assistant"):
            message = (
                "'continue_final_message' requires that the last message is the assistant's, and no 'add_generation_prompt'."
            )
            raise APIError(400, message, "continue_final_message", "invalid_value")
        tools = [tool.model_dump(exclude_none=True) for tool in body.enabled_tools]
        return TemplateOptions(arguments, adds_prompt, continues, tools)


def tool_format_of(prompts: PromptEncoder) -> ToolFormat | None:
    """The format of the model's tool calls; None if it is unknown."""
    format = detect_format(prompts.template)
    if format is None and prompts.response_template is not None:
        format = derive_tools(prompts.response_template, prompts.render(EXAMPLE))
    return format


class ChatFormatter(ChoicesFormatter):
    """Writes chat completions and their chunks."""

    id_prefix = "chatcmpl-"
    body_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        request: ChatBody,
        vocabulary: Vocabulary,
        new_parser: Callable[[], ToolParser] = ReasoningParser,
        request_id: str | None = None,
    ) -> None:
        super().__init__(request, vocabulary, request_id)
        self._names_tool = request.named_tool is not None
        self._parser = OutputParser(new_parser, request.custom_tools)
        self._called: set[int] = set()  # choices with tool calls

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def opening(self, index: int) -> dict[str, Any]:
        return chunk_choice(index, {"role": "assistant", "content": "", "refusal": None})

    def choice_deltas(self, output: ChoiceOutput) -> list[dict[str, Any]]:
        parts = self._parser.parse(output)
        if any(part.kind == "call" for part in parts):
            self._called.add(output.index)
        logprobs, extensions = self._logprobs(output), self._extensions(output)
        deltas = [delta(part) for part in parts] or ([{}] if logprobs or extensions else [])
        choices = [chunk_choice(output.index, each) for each in deltas]
        if choices:
            choices[0] |= {"logprobs": logprobs, **extensions}
        if output.finish is not None:
            reason = self._finish_reason(output.finish, output.index in self._called)
            choices.append(chunk_choice(output.index, {}, reason))
        return choices

    def choice(self, output: ChoiceOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        calls: list[dict[str, Any]] = []
        for part in self._parser.parse(output):
            match part.kind:
                case "content":
                    message["content"] = (message["content"] or "") + part.text
                case "reasoning":
                    message["reasoning_content"] = message.get("reasoning_content", "") + part.text
                case "call":
                    calls.append(new_call(part))
                case "arguments":
                    kind, field = call_fields(part)
                    calls[part.call][kind][field] += part.text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        return {
            "index": output.index,
            "message": message,
            "logprobs": self._logprobs(output),
            "finish_reason": self._finish_reason(output.finish, bool(calls)),
            **self._extensions(output),
        }

    def _finish_reason(self, finish: str | None, called: bool) -> str | None:
        """OpenAI's rule: "tool_calls" after a call, unless the request named the tool."""
        return "tool_calls" if finish == "stop" and called and not self._names_tool else finish

    def _logprobs(self, output: ChoiceOutput) -> dict[str, Any] | None:
        if output.logprobs is None or not self._request.returns_logprobs:
            return None
        return {"content": content_logprobs(self._vocabulary, output), "refusal": None}


def chunk_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    """A choice of a chunk."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def delta(part: Part) -> dict[str, Any]:
    """A part of the answer as a chunk's `delta`."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text}
        case "call":
            return {"tool_calls": [{"index": part.call, **new_call(part)}]}
        case "arguments":
            kind, field = call_fields(part)
            return {"tool_calls": [{"index": part.call, kind: {field: part.text}}]}


def new_call(part: Part) -> dict[str, Any]:
    """A tool call without arguments."""
    kind, field = call_fields(part)
    return {"id": new_call_id(), "type": kind, kind: {"name": part.text, field: ""}}


def call_fields(part: Part) -> tuple[str, str]:
    """The type of the call that a part belongs to, and the field that grows."""
    return ("custom", "input") if isinstance(part, CustomPart) else ("function", "arguments")


def new_call_id() -> str:
    """A new id of a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"
