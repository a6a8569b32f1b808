"""Conversations: messages, the tool calls in them, and the functions that they call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag

from outrider.server.chat.grammar_job import INPUT
from outrider.server.chat.template import TemplateAbilities
from outrider.server.http import json_body
from outrider.server.openai.fields import MAX_ENTRIES, MAX_PARTS, TEXT_OR_LIST, Body, FreeForm, Name, Text

# Types of content in OpenAI's and Anthropic's APIs, and what each is called.
MEDIA = {
    "audio": "An audio recording",
    "audio_url": "An audio recording",
    "computer_screenshot": "A screenshot",
    "container_upload": "A file",
    "document": "A document",
    "file": "A file",
    "image": "An image",
    "image_file": "An image",
    "image_url": "An image",
    "input_audio": "An audio recording",
    "input_file": "A file",
    "input_image": "An image",
    "input_video": "A video",
    "video": "A video",
    "video_url": "A video",
}
PICTURES = ("image", "image_url", "input_image")
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")


class TextPart(Body):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = ""
    refusal: str = ""


class MediaPart(Body):
    """Content that the model cannot read. Its data are dropped, and a line of text stands for it."""

    type: str


def placeholder(content_type: str) -> str:
    """The line that stands for content of one of the types MEDIA. It depends on the type only, so that prefixes are reused."""
    return f"[{MEDIA[content_type]} was left out: this model reads text only.]"


def url_of(value: Any) -> Any:
    """The URL in an `image_url`, which is an object in chats and a string in responses."""
    return value.get("url") if isinstance(value, dict) else value


class PicturePart(MediaPart):
    """A picture. Where the model cannot read it, it is content like the other media."""

    image_url: Annotated[str | None, BeforeValidator(url_of)] = None  # None: it is elsewhere, such as in a stored file


def part_type(part: Any) -> str:
    given = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    if isinstance(given, str) and given in MEDIA:
        return "[picture]" if given in PICTURES else "[media]"
    return "[text]"


def known_parts_only(content: Any) -> Any:
    """The content, if all its parts are of types that are known. Raises ValueError."""
    for part in content if isinstance(content, list) else []:
        given = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
        if given not in (*TEXT_TYPES, *MEDIA):
            raise ValueError(f"content parts must be text, images, audio, video or files, not {given!r}")
    return content


ContentPart = Annotated[
    Annotated[TextPart, Tag("[text]")] | Annotated[PicturePart, Tag("[picture]")] | Annotated[MediaPart, Tag("[media]")],
    Discriminator(part_type),
]
Parts = Annotated[list[ContentPart], Field(max_length=MAX_PARTS, fail_fast=True)]
Content = Annotated[Text | Annotated[Parts, Tag("[array]")], TEXT_OR_LIST, BeforeValidator(known_parts_only)]


class PredictionBody(Body):
    """Text that the client expects in the answer, such as the file that is being edited."""

    type: Literal["content"]
    content: Content


def content_text(content: str | Sequence[TextPart | MediaPart] | None) -> str:
    """Content as one string. A line stands for what the model cannot read."""
    if isinstance(content, str):
        return content
    parts = content or ()
    texts = (placeholder(part.type) if isinstance(part, MediaPart) else part.text or part.refusal for part in parts)
    return ("\n" if any(isinstance(part, MediaPart) for part in parts) else "").join(texts)


def picture_url(part: TextPart | MediaPart) -> str | None:
    return part.image_url if isinstance(part, PicturePart) else None


def template_parts(content: Content | None) -> str | list[dict[str, str]]:
    """Content for a model that reads pictures: a text, or parts of text and of pictures."""
    if isinstance(content, str) or not any(map(picture_url, content or ())):
        return content_text(content)
    found: list[dict[str, str]] = []
    for is_picture, group in groupby(content or (), key=lambda part: picture_url(part) is not None):
        parts = list(group)
        found += [{"type": "image"} for _ in parts] if is_picture else [{"type": "text", "text": content_text(parts)}]
    return found


def media_names(field: str, contents: Iterable[Content | None]) -> Iterator[str]:
    """The names of what is left out of these contents of a body's `field`."""
    for content in contents:
        if not isinstance(content, str):
            yield from (f"{field}.{part.type}" for part in content or () if isinstance(part, MediaPart))


def argument_text(value: Any) -> Any:
    """Arguments as text: some clients send the object, or null."""
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


ArgumentText = Annotated[str, BeforeValidator(argument_text)]


class CalledFunction(Body):
    name: str
    arguments: ArgumentText = ""  # JSON, as the model wrote it


class ToolCall(Body):
    """A call in an earlier turn of the assistant."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: CalledFunction


class CalledCustom(Body):
    name: str
    input: ArgumentText = ""


class CustomToolCall(Body):
    """A call of a custom tool in an earlier turn of the assistant."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustom

    @property
    def function(self) -> CalledFunction:
        arguments = msgspec.json.encode({INPUT: self.custom.input}).decode()
        return CalledFunction(name=self.custom.name, arguments=arguments)


def tool_type(value: Any) -> str | None:
    """The tag of the `type` of a tool, a `tool_choice` or a call; a function's if there is no type."""
    given = (value.get("type") if isinstance(value, dict) else getattr(value, "type", None)) or "function"
    return f"[{given}]" if given in ("function", "custom") else None


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("[function]")] | Annotated[CustomToolCall, Tag("[custom]")],
    Discriminator(tool_type, "unknown_tool", "Input should be an object of type 'function' or 'custom'"),
]


class FunctionDefinition(Body):
    name: Name
    description: str | None = None
    parameters: FreeForm | None = None  # JSON schema
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def name(self) -> str:
        return self.function.name

    @property
    def as_function(self) -> Tool:
        """The function that the model sees."""
        return self

    @property
    def enforced(self) -> Tool:
        """The function whose calls a grammar enforces."""
        return self


class FunctionName(Body):
    name: str


class NamedTool(Body):
    """`tool_choice` that names one tool."""

    type: Literal["function"]
    function: FunctionName

    @property
    def name(self) -> str:
        return self.function.name


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


class Message(Body):
    """One message; its content is text, or parts of text."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyToolCall], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    function_call: CalledFunction | None = None  # the form of calls before there were several
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # other servers' names of the same
    thinking: Any = None
    audio: Any = None  # an earlier answer's

    @property
    def calls(self) -> list[AnyToolCall]:
        legacy = [] if self.function_call is None or self.tool_calls else [ToolCall(function=self.function_call)]
        return [*(self.tool_calls or ()), *legacy]

    @property
    def ignored(self) -> list[str]:
        """The fields that no chat template reads."""
        unread = [name for name in ("reasoning", "thinking") if not isinstance(getattr(self, name), str | None)]
        return [*unread, *(["audio"] if self.audio is not None else [])]

    def rendered(self, has_pictures: bool = False) -> dict[str, Any]:
        """The message as chat templates expect it; with `has_pictures`, the model reads those in it."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = template_parts(self.content) if has_pictures else content_text(self.content)
        message: dict[str, Any] = {"role": role, "content": content or self.refusal or ""}
        for name in ("name", "tool_call_id"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        reasoning = next((text for name in REASONING_FIELDS if isinstance(text := getattr(self, name), str)), None)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": parse_arguments(call.function.arguments)},
                }
                for call in self.calls
            ]
        return message

    @property
    def picture_count(self) -> int:
        """The number of its pictures, also of those without a URL."""
        return 0 if isinstance(self.content, str) else sum(isinstance(part, PicturePart) for part in self.content or ())

    @property
    def picture_urls(self) -> list[str]:
        urls = map(picture_url, () if isinstance(self.content, str) else self.content or ())
        return [url for url in urls if url is not None]


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]


def beginning(messages: Sequence[Message]) -> str:
    """The text of a conversation up to its first user message: later turns do not change it."""
    first = next((number for number, message in enumerate(messages) if message.role == "user"), len(messages))
    return "\0".join(f"{message.role}\0{content_text(message.content)}" for message in messages[: first + 1])


def unrendered(messages: Sequence[Message], abilities: TemplateAbilities) -> list[str]:
    """Names what the chat template does not render of these messages, in any form."""
    named = any(message.name is not None and message.role not in ("tool", "function") for message in messages)
    drops_text = abilities.calls and not abilities.text_with_calls and not abilities.repeats
    beside = any(message.calls and content_text(message.content) for message in messages)
    names = {"name": named and not abilities.names, "text_with_calls": drops_text and beside}
    return [f"messages.{name}" for name, is_left_out in names.items() if is_left_out]


def parse_arguments(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object, whatever the model or the client has written: text that is none is its only field."""
    try:
        value = json_body.decode(arguments)
    except json_body.InvalidJSON:
        return {"raw_arguments": arguments} if arguments.strip() else {}
    if isinstance(value, str):  # some clients encode twice
        return parse_arguments(value)
    return value if isinstance(value, dict) else {} if value in (None, []) else {"raw_arguments": arguments}
