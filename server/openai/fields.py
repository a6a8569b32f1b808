"""The base class of request bodies, and the types of fields that several of them share.

Promises that the cost of validation is bounded: every list and dict has a maximum length, a list's first error ends its
validation, and a look at the value picks the branch of a union.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from outrider.drafters.options import MAX_NODES, DrafterName

# These maximum lengths bound the cost of a body; the settings' limits are lower and have errors of their own. MAX_ENTRIES is
# for messages, input items, prompts, choices and biases, MAX_PARTS for any other list or dict.
MAX_ENTRIES = 1 << 14
MAX_PARTS = 1024
MAX_TOKEN_IDS = 1 << 20
# These are OpenAI's limits.
MAX_METADATA_PAIRS, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512
MAX_TEMPLATE_BYTES = 1 << 16  # bytes of the chat template's arguments, as JSON
MAX_TOKEN_DIGITS = 10


class Body(BaseModel):
    """Part of a request body. Strict like OpenAI's: "5" is not a number, and 1 is not a bool."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


class SamplingFields(Body):
    """The sampling parameters for which a model may have defaults of its own; None = not given."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None  # 0 and -1 = all tokens
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None


class SpeculationBody(Body):
    """Outrider's extension: drafter, draft size and acceptance rule of a request, and what to report of its speculation."""

    drafter: DrafterName | None = None
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES)] | None = None
    # "keyed" gives the same tokens with any drafter; "rejection" preserves only the target's distribution.
    rule: Literal["keyed", "rejection"] | None = None
    corpus: Annotated[str, Field(max_length=256)] | None = None  # the name of one of the key's corpora
    report: bool | None = None
    trace: bool | None = None


class UntracedSpeculation(SpeculationBody):
    """The same for endpoints whose answers have no place for the drafts."""

    trace: Literal[False] | None = None


NO_DEFAULTS = SamplingFields()
LLAMA_SERVER_DEFAULTS = SamplingFields(temperature=0.8, top_p=0.95, top_k=40, min_p=0.05, repetition_penalty=1.0)


def first_given(*layers: SamplingFields) -> dict[str, Any]:
    """Each sampling parameter from the first layer that gives it."""
    values = ((name, [getattr(layer, name) for layer in layers]) for name in SamplingFields.model_fields)
    return {name: next((value for value in given if value is not None), None) for name, given in values}


# What a client that needs an unsupported field can do.
INSTEAD = {
    "background": "wait for the response, or stream it",
    "bad_words": "use 'logit_bias'",
    "context": "use /api/chat with all messages",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
    "max_completion_tokens": "use 'max_output_tokens'",
    "max_tokens": "use 'max_output_tokens'",
    "messages": "use 'input'",
    "mirostat": "use 'top_p' or 'min_p'",
    "n_probs": "use 'logprobs'",
    "reasoning_effort": "use 'reasoning.effort'",
    "response_format": "use 'text.format'",
    "template": "render the prompt yourself and send it with 'raw'",
    "typical_p": "use 'top_p' or 'min_p'",
}


Unsupported = Mapping[str, tuple[Any, ...]]


class CheckedBody(Body):
    """A body whose unsupported fields are rejected by name, unless they have one of the values without effect."""

    unsupported: ClassVar[Unsupported] = {}  # values without effect, by field
    prefix: ClassVar[str] = ""  # of the fields' names in errors

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, body: Any) -> Any:
        for name, without_effect in cls.unsupported.items():
            if isinstance(body, dict) and body.get(name) not in without_effect:
                message = "'{name}' is not supported by this server; leave it out{instead}"
                instead = f", or {INSTEAD[name]}" if name in INSTEAD else ""
                raise PydanticCustomError("unsupported", message, {"name": cls.prefix + name, "instead": instead})
        return body


def json_type(value: Any) -> str | None:
    """The tag of a union's branch. Tags have brackets, because error messages leave out names with brackets."""
    if isinstance(value, str):
        return "[string]"
    if isinstance(value, list):
        return "[array]"
    return "[object]" if isinstance(value, dict | BaseModel) else None


def prompt_type(prompt: Any) -> str | None:
    """`json_type`, with the type of a list's first element."""
    if not isinstance(prompt, list):
        return json_type(prompt)
    first = prompt[0] if prompt else 0
    return "[strings]" if isinstance(first, str) else "[lists of ids]" if isinstance(first, list) else "[ids]"


def check_metadata(metadata: Any) -> Any:
    """The metadata, if it keeps to OpenAI's limits. Raises ValueError."""
    if isinstance(metadata, dict):
        if len(metadata) > MAX_METADATA_PAIRS:
            raise ValueError(f"at most {MAX_METADATA_PAIRS} pairs are allowed, not {len(metadata)}")
        if any(len(key) > MAX_METADATA_KEY for key in metadata):
            raise ValueError(f"a key may have at most {MAX_METADATA_KEY} characters")
        if any(isinstance(value, str) and len(value) > MAX_METADATA_VALUE for value in metadata.values()):
            raise ValueError(f"a value may have at most {MAX_METADATA_VALUE} characters")
    return metadata


def check_biases(biases: Any) -> Any:
    """The biases, if they are numbers from -100 to 100 by token id. Raises ValueError at the first that is not.

    llama-server's form is a list of pairs, in which false bans a token.
    """
    if isinstance(biases, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in biases):
            raise ValueError("as a list, it must contain pairs of a token id and a bias")
        biases = {str(token): -100 if bias is False else bias for token, bias in biases}
    for key, bias in biases.items() if isinstance(biases, dict) else ():
        if not (key.isascii() and key.isdecimal() and len(key) <= MAX_TOKEN_DIGITS):
            raise ValueError(f"its keys must be token ids, not {key[:20]!r}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError("its values must be numbers from -100 to 100")
    return biases


def check_template_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, if they are short. Raises ValueError."""
    if len(msgspec.json.encode(arguments)) > MAX_TEMPLATE_BYTES:
        raise ValueError(f"as JSON, they may have at most {MAX_TEMPLATE_BYTES} bytes")
    return arguments


# A function or a schema has this name; 128 characters are Anthropic's limit.
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
Effort = Annotated[str, Field(max_length=64)]
TokenIds = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Strings = Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)]
FreeForm = Annotated[dict[str, Any], Field(max_length=MAX_PARTS)]  # JSON of any shape; `json_body` bounds its depth
Metadata = Annotated[dict[str, str], BeforeValidator(check_metadata)]
Biases = Annotated[dict[str, float], Field(max_length=MAX_ENTRIES), BeforeValidator(check_biases)]
TemplateArguments = Annotated[FreeForm, AfterValidator(check_template_arguments)]

# Tags name the branches of unions, and discriminators pick one of them.
Text = Annotated[str, Tag("[string]")]
ToolMode = Annotated[Literal["none", "auto", "required"], Tag("[string]")]
TEXT_OR_LIST = Discriminator(json_type, "wrong_type", "Input should be a string or a list")
TextOrStrings = Annotated[Text | Annotated[Strings, Tag("[array]")], TEXT_OR_LIST]
Prompt = Annotated[
    Text
    | Annotated[list[str], Field(max_length=MAX_ENTRIES, fail_fast=True), Tag("[strings]")]
    | Annotated[TokenIds, Tag("[ids]")]
    | Annotated[list[TokenIds], Field(max_length=MAX_ENTRIES, fail_fast=True), Tag("[lists of ids]")],
    Discriminator(prompt_type, "wrong_type", "Input should be a string, a list of strings, or token ids"),
]
