"""Request bodies of /v1/responses, and their conversion to chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from outrider.server.openai import fields
from outrider.server.openai.conversation import Message, PredictionBody, media_names
from outrider.server.openai.responses.items import InputItems, OtherItem, ReasoningItem, content_of, with_system
from outrider.server.openai.responses.tools import HostedChoice, HostedTool, ToolChoice, Tools, chat_choice, own_tools
from outrider.server.openai.schema import ChatBody, StreamOptions
from outrider.server.openai.structures import JsonSchema, ResponseFormat

# As in `unsupported`: OpenAI's fields, then those that chats have and responses do not.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "moderation": (None,),
    "context_management": (None, []),
    "chat_template_kwargs": (None, {}),
    "choice": (None,),
    "frequency_penalty": (None, 0),
    "grammar": (None,),
    "ignore_eos": (None, False),
    "json_schema": (None,),
    "logit_bias": (None, {}, []),
    "logprobs": (None, False),
    "max_completion_tokens": (None,),
    "max_tokens": (None,),
    "messages": (None, []),
    "min_tokens": (None, 0),
    "n": (None, 1),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "regex": (None,),
    "response_format": (None,),
    "stop": (None, [], ""),
    "stop_token_ids": (None, []),
    "structured_outputs": (None,),
}
INCLUDE_LOGPROBS = "message.output_text.logprobs"


class TextFormat(fields.Body):
    """`text.format`, the counterpart of a chat's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[fields.FreeForm | None, Field(alias="schema")] = None
    strict: bool | None = None

    def to_chat(self) -> ResponseFormat:
        """The same format in a chat's body. Raises pydantic's ValidationError."""
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = JsonSchema.model_validate({"name": self.name, "schema": self.schema_, "strict": self.strict})
        return ResponseFormat(type="json_schema", json_schema=schema)

    @model_validator(mode="after")
    def _valid_in_a_chat(self) -> TextFormat:
        self.to_chat()
        return self


class TextSettings(fields.Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint to OpenAI's models


class ReasoningSettings(fields.Body):
    effort: fields.Effort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None  # without effect: the answer has all reasoning


class ResponsesBody(fields.CheckedBody, fields.SamplingFields):
    """POST /v1/responses."""

    unsupported = UNSUPPORTED

    model: str
    input: Annotated[fields.Text | Annotated[InputItems, Tag("[array]")], fields.TEXT_OR_LIST]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None  # counts calls of hosted tools only, so it is without effect
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: fields.Strings | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    metadata: fields.Metadata | None = None
    user: str | None = None  # accepted without effect, like the next six
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: fields.FreeForm | None = None
    client_metadata: fields.FreeForm | None = None
    truncation: Literal["auto", "disabled"] | None = None  # an input beyond the context is always a 400
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    prediction: PredictionBody | None = None  # as in chats
    speculation: fields.UntracedSpeculation | None = None

    @property
    def stores(self) -> bool:
        """Whether the response can be retrieved and continued later."""
        return self.store is not False

    @property
    def text_format(self) -> TextFormat:
        """`text.format`, or its default."""
        return self.text.format if self.text and self.text.format else TextFormat(type="text")

    @property
    def ignored(self) -> list[str]:
        """Names of unsupported parts that are left out: tools, input items, media that the model cannot read, and hints."""
        names = [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, HostedTool)]
        names += [f"tool_choice.{self.tool_choice.type}"] if isinstance(self.tool_choice, HostedChoice) else []
        names += [f"input.{item.type}" for item in self.input if isinstance(item, OtherItem)]
        names += ["input.encrypted_content" for item in self.input if isinstance(item, ReasoningItem) and not item.text]
        names += media_names("input", map(content_of, () if isinstance(self.input, str) else self.input))
        names += ["text.verbosity"] if self.text and self.text.verbosity else []
        return list(dict.fromkeys(names))

    def to_chat(self, messages: Sequence[Message], cache_key: str | None) -> ChatBody:
        """The request as a chat of `messages` after the instructions.

        `cache_key` is used if the request has none. Raises pydantic's ValidationError.
        """
        return ChatBody(
            model=self.model,
            messages=with_system(self.instructions, messages),
            max_completion_tokens=self.max_output_tokens,
            **{name: getattr(self, name) for name in fields.SamplingFields.model_fields},
            seed=self.seed,
            tools=[tool.to_chat() for tool in own_tools(self.tools)] or None,
            tool_choice=chat_choice(self.tool_choice, self.tools),
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self.text.format.to_chat() if self.text and self.text.format else None,
            reasoning_effort=self.reasoning.effort if self.reasoning else None,
            stream=self.stream,
            stream_options=self.stream_options,
            logprobs=INCLUDE_LOGPROBS in (self.include or ()) or self.top_logprobs is not None,
            top_logprobs=self.top_logprobs,
            prompt_cache_key=self.prompt_cache_key or cache_key,
            prediction=self.prediction,
            speculation=self.speculation,
        )
