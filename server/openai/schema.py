"""The bodies that clients send, validated as OpenAI does: unknown fields are ignored, wrong types name the field."""

from __future__ import annotations

import secrets
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from drafters.interface import MAX_NODES
from drafters.options import DrafterName
from server.openai.conversation import Body, Message, NamedTool, TextPart, Tool
from verify.sampling_params import SamplingParams

UINT64 = (1 << 64) - 1
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class PredictionBody(Body):
    """What the client expects to read, such as the file that it asks to be edited."""

    type: Literal["content"]
    content: str | list[TextPart]


# What OpenAI's API has and this server does not do, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "store": (None, False),
}


def refuse_unsupported(body: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> Any:
    """The body, if none of the fields asks for what this server does not do; by name the values that ask for nothing."""
    for name, harmless in unsupported.items():
        if isinstance(body, dict) and body.get(name) not in harmless:
            sentence = "'{name}' is not supported by this server; leave it out"
            raise PydanticCustomError("unsupported", sentence, {"name": name})
    return body


class JsonSchema(Body):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' goes with type 'json_schema', and only with it")
        return self


class SpeculationBody(Body):
    """Outrider's own field: which drafter, how many nodes, by which rule, and whether to report what it did."""

    drafter: DrafterName | None = None
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] | None = None
    rule: Literal["keyed", "rejection"] | None = None  # by the second, not the tokens but their distribution is the target's
    report: bool | None = None


class GenerationBody(Body):
    """What both endpoints share."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    speculation: SpeculationBody | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    prediction: PredictionBody | None = None
    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark
    choice: Annotated[list[str], Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None  # in the queue; lower comes first
    user: str | None = None  # this and the next are taken and change nothing
    metadata: dict[str, str] | None = None
    service_tier: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _nothing_unsupported(cls, body: Any) -> Any:
        return refuse_unsupported(body, UNSUPPORTED)

    @field_validator("logit_bias")
    @classmethod
    def _biases_name_tokens(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for name in biases or {}:
            if not (name.isascii() and name.isdecimal()):
                raise ValueError(f"its keys are token ids, and {name[:20]!r} is none")
        return biases

    @property
    def obfuscates(self) -> bool:
        """The stream's chunks are padded, so that their sizes do not show what is in them."""
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    @property
    def structures(self) -> dict[str, tuple[str, Any]]:
        """The fields that ask for structured output: each with what kind of structure it is, and the structure."""
        found: dict[str, tuple[str, Any]] = {}
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            found["response_format"] = ("json_object", None)
        elif wanted is not None and wanted.json_schema is not None:
            kind = "json_schema" if wanted.json_schema.strict else "lenient_json_schema"
            found["response_format"] = (kind, wanted.json_schema.schema_ or {})
        for name in ("regex", "grammar", "choice"):
            if getattr(self, name) is not None:
                found[name] = (name, getattr(self, name))
        return found

    @property
    @abstractmethod
    def top_logprobs_wanted(self) -> int | None:
        """How many likeliest tokens are computed beside each chosen one; None = nothing is."""

    @property
    def shows_logprobs(self) -> bool:
        """The answer has log-probabilities."""
        return self.top_logprobs_wanted is not None

    @property
    def scores_prompt(self) -> bool:
        """The prompt's tokens get log-probabilities, too."""
        return False

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, however they were given."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in given if stop)

    @property
    def sampling(self) -> SamplingParams:
        """How tokens are chosen; without a seed, a fresh one."""
        seed = secrets.randbits(64) if self.seed is None else self.seed & UINT64
        return SamplingParams(
            1.0 if self.temperature is None else float(self.temperature),
            1.0 if self.top_p is None else float(self.top_p),
            max(0, self.top_k or 0),
            float(self.min_p or 0.0),
            seed,
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=float(self.repetition_penalty or 1.0),
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            rule=(self.speculation and self.speculation.rule) or "keyed",
            logprobs=self.top_logprobs_wanted,
        )

    @property
    def include_usage(self) -> bool:
        """The stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _the_choice_is_a_tool(self) -> ChatBody:
        names = [tool.function.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("'tool_choice' needs 'tools'")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(f"'tool_choice' names {self.tool_choice.function.name!r}, which is not one of 'tools'")
        return self

    @property
    def usable_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced_tools(self) -> list[Tool]:
        """The tools of which it must call one; empty where it need not."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools or () if tool.function.name == self.tool_choice.function.name]
        return self.tools or [] if self.tool_choice == "required" else []

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """At most so many tokens of answer; None = as many as the context holds."""
        return self.max_completion_tokens or self.max_tokens


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # 0 asks for the prompt alone, with `echo`
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: str | None = None

    @property
    def top_logprobs_wanted(self) -> int | None:
        return 0 if self.logprobs is None and self.candidates > (self.n or 1) else self.logprobs

    @property
    def shows_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def candidates(self) -> int:
        """How many answers are made for each prompt; `n` of them are returned."""
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one."""
        prompt = self.prompt
        if isinstance(prompt, str) or all(isinstance(token, int) for token in prompt):
            return [cast(str | list[int], prompt)]
        return [cast(str | list[int], each) for each in prompt]

    @property
    def token_limit(self) -> int:
        """At most so many tokens of answer."""
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens


class TokenizeBody(Body):
    """POST /tokenize: a text, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either 'prompt' or 'messages'")
        return self


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
