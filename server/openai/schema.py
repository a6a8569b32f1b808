"""Request bodies of chats and completions, validated as OpenAI does.

Unknown fields are ignored, unsupported ones are rejected by name, and errors of type or range name the field.
"""

from __future__ import annotations

import secrets
from abc import abstractmethod
from functools import cached_property
from typing import Annotated, ClassVar, cast

from pydantic import BeforeValidator, Field, model_validator

from outrider.server.chat.grammar_job import InputGrammar
from outrider.server.openai.conversation import Messages, NamedTool, PredictionBody, Tool, media_names
from outrider.server.openai.fields import (
    MAX_PARTS,
    NO_DEFAULTS,
    Biases,
    Body,
    CheckedBody,
    Effort,
    Metadata,
    Prompt,
    SamplingFields,
    SpeculationBody,
    TemplateArguments,
    TextOrStrings,
    first_given,
)
from outrider.server.openai.samplers import Samplers, select
from outrider.server.openai.structures import StructureFields
from outrider.server.openai.tools.definitions import AllowedChoice, CustomTool, NamedCustomTool, ToolChoice, Tools
from outrider.server.openai.unsupported import UNSUPPORTED, UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_COMPLETIONS
from outrider.verify.sampling_params import SamplingParams

UINT64 = (1 << 64) - 1
DEFAULT_COMPLETION_TOKENS = 16
# Below this, sampling is greedy.
MIN_TEMPERATURE = 1e-5
# This is smaller than the most likely token's probability in any vocabulary, so it keeps that token only.
MIN_TOP_P = 1e-6


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationBody(CheckedBody, SamplingFields, StructureFields):
    """The fields that chats and completions share."""

    model: str = ""  # empty = the served model
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: TextOrStrings | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_id: Annotated[str, Field(max_length=256)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=256)] | None = None
    speculation: SpeculationBody | None = None
    # The name of an adapter, as `model` may be, too. Of llama-server's field, a list, only an empty one is accepted.
    lora: Annotated[str | None, BeforeValidator(lambda value: None if value == [] else value)] = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    samplers: Samplers | None = None  # llama-server's, like the next two; None = all
    repeat_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    n_predict: Annotated[int, Field(ge=-1)] | None = None  # -1 = up to the end of the context
    logit_bias: Biases | None = None
    min_tokens: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None
    prediction: PredictionBody | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None  # lower values are scheduled first
    user: str | None = None  # accepted without effect, like the next two
    metadata: Metadata | None = None
    service_tier: str | None = None

    unsupported = UNSUPPORTED
    api_defaults: ClassVar[SamplingFields] = SamplingFields(
        temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0
    )

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """The longest answer, in tokens; None = up to the end of the context."""

    @property
    def predicted_tokens(self) -> int | None:
        """`n_predict` as a limit."""
        return None if self.n_predict == -1 else self.n_predict

    @property
    def candidates(self) -> int:
        """Number of answers generated per prompt."""
        return self.n or 1

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Number of most likely tokens to compute besides the chosen one, at each position; None = no log-probabilities."""

    @property
    def corpus(self) -> str | None:
        """The name of the corpus that the drafts may use, if the request chooses one."""
        return self.speculation.corpus if self.speculation else None

    @property
    def returns_logprobs(self) -> bool:
        """Whether the answer contains the log-probabilities that are computed."""
        return self.num_logprobs is not None

    @property
    def returns_prompt_logprobs(self) -> bool:
        """Whether the answer contains log-probabilities of the prompt's tokens."""
        return False

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def pads_stream(self) -> bool:
        """Whether chunks are padded, so that their sizes do not reveal their content."""
        return bool(self.stream_options and self.stream_options.include_obfuscation)

    @property
    def reports_speculation(self) -> bool:
        """Whether the answer ends with a `speculation` block."""
        return bool(self.speculation and self.speculation.report)

    @property
    def traces_steps(self) -> bool:
        """Whether each chunk contains the draft of its step."""
        return bool(self.speculation and self.speculation.trace)

    @property
    def hides_special_tokens(self) -> bool:
        """Whether special tokens are left out of the answer's text."""
        return self.skip_special_tokens is not False

    @property
    def continues_prompt(self) -> bool:
        """Whether the answer's text continues the prompt's, instead of being a text of its own."""
        return True

    @property
    def stop_strings(self) -> tuple[str, ...]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(stop for stop in stops if stop)

    def sampling_params(self, model_defaults: SamplingFields = NO_DEFAULTS) -> SamplingParams:
        """The sampling parameters, without the acceptance rule. Draws a random seed if the request has none.

        A parameter that the request leaves out, or that is null, has the model's default, or else the API's.
        """
        values = first_given(self, SamplingFields(repetition_penalty=self.repeat_penalty), model_defaults, self.api_defaults)
        temperature = float(values["temperature"])
        params = SamplingParams(
            temperature=0.0 if temperature < MIN_TEMPERATURE else temperature,
            top_p=max(MIN_TOP_P, float(values["top_p"])),
            top_k=max(0, values["top_k"]),
            min_p=float(values["min_p"]),
            seed=secrets.randbits(64) if self.seed is None else self.seed & UINT64,
            presence_penalty=float(self.presence_penalty or 0.0),
            frequency_penalty=float(self.frequency_penalty or 0.0),
            repetition_penalty=float(values["repetition_penalty"]),
            logit_bias={int(token): float(bias) for token, bias in (self.logit_bias or {}).items()},
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=self.num_logprobs,
        )
        return params if self.samplers is None else select(params, self.samplers)


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    unsupported = UNSUPPORTED | UNSUPPORTED_IN_CHATS

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: Annotated[int, Field(ge=0, le=1 << 31)] | None = None  # at most this many tokens of reasoning
    chat_template_kwargs: TemplateArguments | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _choice_is_a_tool(self) -> ChatBody:
        self.check_choice()
        return self

    def check_choice(self) -> None:
        """Raises ValueError if `tool_choice` names a tool that is not one of `tools`."""
        names = [tool.name for tool in self.tools or ()]
        if self.tool_choice not in (None, "none", "auto") and not names:
            raise ValueError("'tool_choice' needs 'tools'")
        missing = next((name for name in self.chosen_names or () if name not in names), None)
        if missing is not None:
            raise ValueError(f"'tool_choice' names {missing!r}, which is not one of 'tools'")

    @property
    def named_tool(self) -> str | None:
        """The tool that must be called once."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedTool | NamedCustomTool) else None

    @property
    def chosen_names(self) -> frozenset[str] | None:
        """The tools that `tool_choice` leaves; None = all."""
        if isinstance(self.tool_choice, AllowedChoice):
            return frozenset(tool.name for tool in self.tool_choice.allowed_tools.tools)
        return None if self.named_tool is None else frozenset([self.named_tool])

    @property
    def enabled_tools(self) -> list[Tool]:
        """The tools that the model may call, as the functions that it sees."""
        if self.tool_choice == "none":
            return []
        chosen = self.chosen_names if isinstance(self.tool_choice, AllowedChoice) else None
        return [tool.as_function for tool in self.tools or () if chosen is None or tool.name in chosen]

    @property
    def custom_tools(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def requires_call(self) -> bool:
        choice = self.tool_choice
        return (choice.allowed_tools.mode if isinstance(choice, AllowedChoice) else choice) not in (None, "none", "auto")

    @cached_property
    def enforced_tools(self) -> list[Tool]:
        """The tools of whose calls a grammar is made, as functions: if a call is required, or stands in for a structure."""
        return [tool.enforced for tool in self._enforced()]

    @property
    def strict_tools(self) -> list[str]:
        """The names of the tools whose schemas must be enforced wholly."""
        return [tool.name for tool in self.enforced_tools if tool.function.strict]

    @property
    def enforced_inputs(self) -> dict[str, InputGrammar]:
        """The grammars of the inputs of custom tools among `enforced_tools`, by name; beside a structure, none is enforced."""
        custom = [tool for tool in self._enforced() if isinstance(tool, CustomTool) and self.requires_call]
        grammars = {tool.name: tool.input_grammar for tool in custom}
        return {name: grammar for name, grammar in grammars.items() if grammar is not None}

    def _enforced(self) -> list[Tool | CustomTool]:
        if self.tool_choice == "none" or not (self.requires_call or self.structures):
            return []
        return [tool for tool in self.tools or () if self.chosen_names is None or tool.name in self.chosen_names]

    @property
    def ignored(self) -> list[str]:
        """Names of media that the model cannot read and that are left out of the prompt."""
        names = [*media_names("messages", (message.content for message in self.messages))]
        names += [f"messages.{name}" for message in self.messages for name in message.ignored]
        return list(dict.fromkeys(names))

    @property
    def continues_prompt(self) -> bool:
        return bool(self.continue_final_message)

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        limit = self.max_completion_tokens or self.max_tokens
        return self.predicted_tokens if limit is None else limit


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    unsupported = UNSUPPORTED | UNSUPPORTED_IN_COMPLETIONS

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None  # with 0 and `echo`, only the prompt is returned
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None  # number of candidates; the best `n` are returned
    suffix: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        return 0 if self.logprobs is None and self.candidates > (self.n or 1) else self.logprobs  # `best_of` ranks by them

    @property
    def returns_logprobs(self) -> bool:
        return self.logprobs is not None

    @property
    def returns_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def candidates(self) -> int:
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list, each as text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            return [cast(str | list[int], prompt)]
        return [*cast(list[str | list[int]], prompt)]

    @property
    def token_limit(self) -> int | None:
        if self.max_tokens is not None:
            return self.max_tokens
        return DEFAULT_COMPLETION_TOKENS if self.n_predict is None else self.predicted_tokens
