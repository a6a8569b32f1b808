"""/v1/chat/completions: the endpoint."""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HTTPRequest
from fastapi import Response

from outrider.server.chat.grammar_job import GrammarJob
from outrider.server.chat.prompt import PromptEncoder, TemplateOptions
from outrider.server.chat.reasoning_parser import THINK, ReasoningParser, detect_reasoning
from outrider.server.chat.structured_output import Enforced, GrammarChecker, only
from outrider.server.chat.template import ChatTemplates, with_structures
from outrider.server.chat.tools import FORMATS, ToolFormat, ToolParser, detect_format, markers_of, tool_parser, with_model_ids
from outrider.server.chat.tools.grammar import MAX_CALLS
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import PictureInput, Request
from outrider.server.http.errors import APIError
from outrider.server.http.ignored import report_ignored
from outrider.server.http.json_route import in_turn, turn_of
from outrider.server.openai.chat_formatter import ChatFormatter
from outrider.server.openai.conversation import PICTURES, unrendered
from outrider.server.openai.generation import GenerationRunner, GenerationTask, Stop
from outrider.server.openai.output_parser import HiddenMarkers, SingleCallParser, SingleCallStop
from outrider.server.openai.requests import RequestBuilder, check_count
from outrider.server.openai.schema import ChatBody
from outrider.server.pictures.service import NO_PICTURES, PictureService
from outrider.server.settings import Settings
from outrider.verify.sampling_params import ReasoningLimit

log = logging.getLogger("outrider")
MAX_MESSAGES = 2048


@dataclass(frozen=True)
class EncodedChat:
    tokens: list[int]
    pictures: list[PictureInput]
    reads_pictures: bool  # whether the model reads all pictures of the chat
    left_out: Sequence[str] = ()  # what the chat template does not render

    def ignored(self, names: Sequence[str]) -> list[str]:
        """The left-out parts: a body's names, without pictures that the model reads, and those of the template."""
        return [*(name for name in names if not (self.reads_pictures and name.rpartition(".")[2] in PICTURES)), *self.left_out]


@dataclass(frozen=True)
class PreparedChat:
    requests: list[Request]
    prompt: EncodedChat
    new_parser: Callable[[], ToolParser]  # a parser for one choice
    new_stop: Callable[[], Stop] | None = None  # what ends a choice early
    unenforced: Sequence[str] = ()  # names of what the grammar leaves to the model

    def ignored(self, names: Sequence[str]) -> list[str]:
        """`EncodedChat.ignored`, and the names of keywords that are not enforced."""
        return [*self.prompt.ignored(names), *self.unenforced]


@dataclass(eq=False)
class ChatEndpoint:
    """POST /v1/chat/completions. Endpoints whose bodies convert to chats use `prepare`."""

    settings: Settings
    prompts: PromptEncoder
    vocabulary: Vocabulary
    grammars: GrammarChecker
    requests: RequestBuilder
    runner: GenerationRunner
    pictures: PictureService

    def __post_init__(self) -> None:
        prompts, configured = self.prompts, self.settings.model.tool_format
        prompts.templates.probe()
        self._tool_format = tool_format_of(prompts.templates) if configured == "auto" else FORMATS[configured]
        if self._tool_format is None and prompts.templates:
            log.warning("the chat template's format of tool calls is unknown, so only JSON is read; set model.tool_format")
        self._call_format = self._tool_format or FORMATS["hermes"]
        self._reasoning = detect_reasoning(prompts.templates.text)
        markers = self._reasoning or THINK
        self._reasoning_tokens = prompts.token(markers.opening), prompts.token(markers.closing)

    @property
    def capabilities(self) -> list[str]:
        """The model's capabilities on this server, as its card names them."""
        known = {
            "chat": bool(self.prompts.templates),
            "tools": bool(self.prompts.templates) and self._tool_format is not None,
            "reasoning": bool(self.prompts.templates) and self._reasoning is not None,
            "structured_outputs": True,
            "fill_in": self.prompts.fills_in,
        }
        return [name for name, has in known.items() if has]

    async def create(self, http: HTTPRequest, body: ChatBody) -> Response:
        """Answers a chat. Raises APIError and EngineError."""
        arrived = time.monotonic()
        body = self.requests.named(body)
        chat = await self.prepare(http, body)
        formatter = ChatFormatter(body, self.vocabulary, chat.new_parser, chat.requests[0].id)
        task = GenerationTask(
            chat.requests, formatter, arrived, choices=body.candidates, padded=body.pads_stream, new_stop=chat.new_stop
        )
        return report_ignored(http, await self.runner.respond(http, task, bool(body.stream)), chat.ignored(body.ignored))

    async def prepare(self, http: HTTPRequest, body: ChatBody) -> PreparedChat:
        """Checks the body, renders and encodes its prompt, and compiles its grammar. Raises APIError."""
        prompt = await self.encode(http, body)
        opened = self._reasoning is not None and self.prompts.ends_with(prompt.tokens, self._reasoning.opening)
        grammar, unenforced = await self._grammar(http, body, opened)
        limit = self._reasoning_limit(body, opened)
        markers = self._special_markers(body)
        shown = [self.vocabulary.special[marker] for marker in markers]
        requests = await self.requests.build(
            http, body, [prompt.tokens], grammar, limit, shown, prompt.pictures, open_ended=bool(body.enforced_tools)
        )

        def new_parser() -> ToolParser:
            return HiddenMarkers(self._new_parser(body, opened), markers if body.hides_special_tokens else [])

        if body.parallel_tool_calls is False and body.enabled_tools and not body.enforced_tools:  # else the grammar allows one
            parser, stop = lambda: SingleCallParser(new_parser()), lambda: SingleCallStop(new_parser())
            return PreparedChat(requests, prompt, parser, stop, unenforced)
        return PreparedChat(requests, prompt, new_parser, None, unenforced)

    def _new_parser(self, body: ChatBody, opened: bool) -> ReasoningParser:
        """A parser for one choice. `opened`: the prompt has opened the reasoning."""
        functions = {tool.function.name: tool.function.parameters for tool in body.enabled_tools}
        if self._reasoning is not None and self._reasoning.channels:
            return ReasoningParser(tool_parser("harmony", functions))
        tools = tool_parser(self._call_format.name, functions) if functions else None
        return ReasoningParser(tools, self._reasoning is not None, opened, self._reasoning or THINK)

    async def encode(self, http: HTTPRequest, body: ChatBody) -> EncodedChat:
        """Checks the body, and returns its prompt. Raises APIError and EngineError."""
        self.requests.check(body)
        check_count("messages", len(body.messages), MAX_MESSAGES, "messages")
        if body.top_logprobs is not None and not body.logprobs:
            raise APIError(400, "'top_logprobs' needs 'logprobs': true.", "top_logprobs", "invalid_value")
        ready = await self.requests.ready()
        has_pictures = any(message.picture_count for message in body.messages)
        reads = has_pictures and ready.reads_pictures and await self.pictures.is_available()
        template = self.prompts.template(bool(body.enabled_tools))
        left_out = unrendered(body.messages, template.abilities)
        roles = template.picture_roles if reads else frozenset[str]()
        urls = [url for message in body.messages if message.role in roles for url in message.picture_urls]
        messages, options = await in_turn(http, lambda: (self._rendered(body, roles), self._template_options(body)))
        pictures = await self.pictures.prepare(turn_of(http), urls) if urls else NO_PICTURES
        tokens = await self.prompts.chat(http.state.principal, messages, options, ready.context_tokens, pictures)
        if not urls:
            return EncodedChat(tokens, [], False, left_out)
        placed = self.pictures.place(tokens, pictures.prepared, self.prompts.rare_ids)
        all_read = len(urls) == sum(message.picture_count for message in body.messages)
        return EncodedChat(*placed, all_read, left_out)

    def _rendered(self, body: ChatBody, picture_roles: Collection[str]) -> list[dict[str, Any]]:
        """The messages as the chat template takes them, with the pictures of these roles."""
        messages = [message.rendered(message.role in picture_roles) for message in body.messages]
        structures = [each.description for each in body.structures.values()] if body.enabled_tools else []
        return with_model_ids(with_structures(messages, structures), self._tool_format.call_id if self._tool_format else "")

    def _reasoning_limit(self, body: ChatBody, is_open: bool) -> ReasoningLimit | None:
        """The limit of the reasoning. None if the request has none, or the markers of reasoning are not tokens of the model."""
        opening, closing = self._reasoning_tokens
        if body.thinking_token_budget is None or closing is None or (opening is None and not is_open):
            return None
        return ReasoningLimit(body.thinking_token_budget, closing, None if is_open else opening)

    def _special_markers(self, body: ChatBody) -> list[str]:
        """The special tokens that the parser needs to see: the markers of the reasoning, and of calls if there are tools."""
        reasoning = self._reasoning
        texts = {reasoning.opening, reasoning.closing, *(reasoning.wrapper or ())} if reasoning else set[str]()
        if reasoning is not None and reasoning.channels:
            texts |= markers_of(FORMATS["harmony"])
        if body.enabled_tools:
            texts |= markers_of(self._call_format)
        return [token for token in self.vocabulary.special if any(token in text for text in texts)]

    async def _grammar(self, http: HTTPRequest, body: ChatBody, opened: bool) -> Enforced:
        """The grammar that the answer follows, after the reasoning if the prompt has opened it. Raises APIError.

        Where tools may be called, a structure is that of an answer without calls.
        """
        prefix, tokens = "", self.vocabulary.grammar_tokens
        if self._reasoning is not None and opened:
            prefix = self._reasoning.prefix(tokens, calls=body.requires_call)
        if not body.enforced_tools:
            return await self.grammars.grammar(body.structures, http.state.principal, prefix, tokens)
        name, structure = only({} if body.requires_call else body.structures)
        job = GrammarJob(
            prefix=prefix,
            structure=structure,
            name=name,
            functions={tool.function.name: tool.function.parameters or {"type": "object"} for tool in body.enforced_tools},
            inputs=body.enforced_inputs,
            format=self._call_format.name,
            special=tokens,
            max_calls=1 if body.parallel_tool_calls is False or body.named_tool is not None else MAX_CALLS,
            strict=body.strict_tools,
        )
        return await self.grammars.check(job, http.state.principal)

    def _template_options(self, body: ChatBody) -> TemplateOptions:
        """The request's options of the chat template. Raises APIError."""
        arguments = dict(body.chat_template_kwargs or {})
        allowed = self.settings.limits.template_arguments
        unknown = sorted(set(arguments) - set(allowed))
        if unknown:
            message = f"'chat_template_kwargs' may contain {', '.join(allowed)}, not {unknown[0]!r}."
            raise APIError(400, message, "chat_template_kwargs", "invalid_value")
        if body.reasoning_effort is not None:
            arguments["reasoning_effort"] = body.reasoning_effort
        continues = bool(body.continue_final_message)
        adds_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
        if continues and (adds_prompt or body.messages[-1].role != "assistant"):
            message = "'continue_final_message' needs the assistant's message at the end, and no 'add_generation_prompt'."
            raise APIError(400, message, "continue_final_message", "invalid_value")
        unread = {"function": {"strict"}}  # it is for the server; models are not trained to read it
        tools = [tool.model_dump(exclude_none=True, exclude=unread) for tool in body.enabled_tools]
        return TemplateOptions(arguments, adds_prompt, continues, tools, self._tool_format or FORMATS["hermes"])


def tool_format_of(templates: ChatTemplates) -> ToolFormat | None:
    """The format of the model's tool calls; None if it is unknown.

    A chat template that renders no tools takes the most common format, which the prompt then describes.
    """
    if not templates:
        return None
    template = templates.choose(has_tools=True)
    return detect_format(template.text) or (None if template.abilities.tools else FORMATS["hermes"])
