"""Request bodies of Ollama's API. As there, options that are not known have no effect; a header of the answer names them."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from outrider.server.openai.conversation import Message
from outrider.server.openai.fields import (
    MAX_ENTRIES,
    Body,
    CheckedBody,
    FreeForm,
    SamplingFields,
    Strings,
    TextOrStrings,
    Unsupported,
    json_type,
)
from outrider.server.openai.structures import ResponseFormat
from outrider.server.openai.tools.definitions import Tools

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
DURATION = re.compile(r"(-?)((?:\d{1,15}(?:\.\d{1,9})?(?:ns|us|µs|ms|s|m|h|$)){1,7})")
PART = re.compile(r"([\d.]+)([^\d.]*)")
CENTURY_SECONDS = 36525 * 86400.0


def seconds_of(keep_alive: Any) -> float | None:
    """The seconds for which a model stays in memory after a request. Raises ValueError.

    A century or a negative time means forever, inf; null is None.
    """
    if keep_alive is None:
        return None
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        seconds = keep_alive
    elif isinstance(keep_alive, str) and (found := DURATION.fullmatch(keep_alive)):
        seconds = sum(float(number) * UNITS[unit] for number, unit in PART.findall(found[2])) * (-1 if found[1] else 1)
    else:
        raise ValueError("it must be a number of seconds, or a duration such as '5m' or '1h30m'")
    return float(seconds) if 0 <= seconds < CENTURY_SECONDS else math.inf


Format = Annotated[
    Annotated[Literal["", "json"], Tag("[string]")] | Annotated[FreeForm, Tag("[object]")],
    Discriminator(json_type, "wrong_type", "Input should be 'json' or a JSON schema"),
]
# As an option, a number that has no fraction may be written with one.
Count = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63, strict=False)]


class Options(SamplingFields):
    """Sampling and length. Others, such as `num_ctx`, are not used: the settings have them."""

    model_config = ConfigDict(extra="allow")

    top_k: Annotated[int, Field(ge=-1, le=1 << 31, strict=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    num_predict: Count | None = None  # not positive = up to the end of the context
    seed: Count | None = None  # -1 = a random one
    stop: TextOrStrings | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    @property
    def fields(self) -> dict[str, Any]:
        named = {name: getattr(self, name) for name in type(self).model_fields if name != "num_predict"}
        limit = self.num_predict if self.num_predict is not None and self.num_predict > 0 else -1
        return {**named, "seed": None if self.seed == -1 else self.seed, "n_predict": limit}


def check_keep_alive(value: Any) -> Any:
    """The value, if it is a duration. Raises ValueError."""
    seconds_of(value)
    return value


class ModelBody(Body):
    """Names a model. Older clients call the field `name`."""

    model: str = ""
    name: str = ""
    keep_alive: Annotated[Any, AfterValidator(check_keep_alive)] = None

    @property
    def model_name(self) -> str:
        return self.model or self.name

    @property
    def unloads(self) -> bool:
        """Whether the model is to leave the memory when nobody uses it."""
        return seconds_of(self.keep_alive) == 0


class AnswerBody(ModelBody):
    """The fields that /api/chat and /api/generate share."""

    is_chat: ClassVar[bool]

    options: Options | None = None
    format: Format | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream, which it is by default."""
        return self.stream is not False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that chats and completions share."""
        structure: dict[str, Any] = {"json_schema": self.format if isinstance(self.format, dict) else None}
        if self.format == "json":
            structure["response_format"] = ResponseFormat(type="json_object")
        return {**(self.options or Options()).fields, **structure, "model": self.model_name, "stream": self.streams}

    @property
    def ignored(self) -> list[str]:
        return [f"options.{name}" for name in (self.options and self.options.model_extra) or ()]


class ChatMessage(Message):
    """One message. Pictures are apart from its text, and a tool's result names its tool."""

    images: Strings | None = None  # in base64
    tool_name: str | None = None


class ChatRequest(AnswerBody):
    """POST /api/chat. Without messages, it loads the model, or unloads it."""

    is_chat = True

    messages: Annotated[list[ChatMessage], Field(max_length=MAX_ENTRIES, fail_fast=True)] | None = None
    tools: Tools | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages


class GenerateRequest(CheckedBody, AnswerBody):
    """POST /api/generate. Without a prompt, it loads the model, or unloads it."""

    unsupported: ClassVar[Unsupported] = {"context": (None, []), "template": (None, "")}
    is_chat = False

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    images: Strings | None = None
    raw: bool | None = None

    @model_validator(mode="after")
    def _text_is_alone(self) -> GenerateRequest:
        if self.is_text and (self.system or self.images):
            raise ValueError("'raw' and 'suffix' leave no place for 'system' and 'images'; leave these out")
        return self

    @property
    def is_text(self) -> bool:
        """Whether the prompt is used as it is, without the chat template."""
        return bool(self.raw or self.suffix)

    @property
    def is_empty(self) -> bool:
        return not (self.prompt or self.suffix or self.images)
