"""Structured output: OpenAI's `response_format`, and the fields of vLLM and llama-server."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from outrider.server.chat.grammar_job import Structure
from outrider.server.http import json_body
from outrider.server.openai.fields import MAX_ENTRIES, Body, CheckedBody, FreeForm, Name, Unsupported, json_type


def parse_schema(schema: Any) -> Any:
    """The JSON schema, which vLLM's clients may send as text. Raises ValueError if it is not an object."""
    value = json_body.decode(schema) if isinstance(schema, str) else schema
    if not isinstance(value, dict):
        raise ValueError("a JSON schema must be an object")
    return value


Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]
Schema = Annotated[
    Annotated[str, Tag("[string]")] | Annotated[FreeForm, Tag("[object]")],
    Discriminator(json_type, "wrong_type", "Input should be an object, or a string of JSON"),
    AfterValidator(parse_schema),
]


class JsonSchema(Body):
    name: Name
    description: str | None = None
    schema_: Annotated[FreeForm | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[FreeForm | None, Field(alias="schema")] = None  # llama-server's, with type "json_object"

    @model_validator(mode="after")
    def _schema_matches_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' is required with type 'json_schema', and not allowed with any other type")
        if self.schema_ is not None and self.type != "json_object":
            raise ValueError("'schema' is allowed with type 'json_object' only")
        return self

    @property
    def structure(self) -> Structure | None:
        """The structure; None = any text."""
        if self.json_schema is not None:
            kind = "json_schema" if self.json_schema.strict else "lenient_json_schema"
            return Structure(kind, self.json_schema.schema_ or {})
        if self.type == "text":
            return None
        return Structure("json_object", None) if self.schema_ is None else Structure("lenient_json_schema", self.schema_)


class StructuredOutputs(CheckedBody):
    """vLLM's `structured_outputs`. Its other options have no effect: JSON is always written without needless spaces."""

    unsupported: ClassVar[Unsupported] = {
        "structural_tag": (None,),
        "whitespace_pattern": (None,),
        "disable_additional_properties": (None, False),
    }
    prefix = "structured_outputs."

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructureFields(Body):
    """The fields that ask for a structured output."""

    response_format: ResponseFormat | None = None
    regex: str | None = None
    grammar: str | None = None  # in llguidance's dialect of Lark, or in GBNF
    choice: Choices | None = None
    json_schema: FreeForm | None = None  # llama-server's
    structured_outputs: StructuredOutputs | None = None  # vLLM's, like the next four
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def structures(self) -> dict[str, Structure]:
        options = self.structured_outputs or StructuredOutputs()
        found: dict[str, tuple[str, Any]] = {
            "regex": ("regex", self.regex),
            "grammar": ("grammar", self.grammar),
            "choice": ("choice", self.choice),
            "json_schema": ("lenient_json_schema", self.json_schema),
            "structured_outputs.json": ("json_schema", options.json_),
            "structured_outputs.regex": ("regex", options.regex),
            "structured_outputs.choice": ("choice", options.choice),
            "structured_outputs.grammar": ("grammar", options.grammar),
            "structured_outputs.json_object": ("json_object", options.json_object or None),
            "guided_json": ("json_schema", self.guided_json),
            "guided_regex": ("regex", self.guided_regex),
            "guided_choice": ("choice", self.guided_choice),
            "guided_grammar": ("grammar", self.guided_grammar),
        }
        given = {field: Structure(*structure) for field, structure in found.items() if structure[1] is not None}
        requested = self.response_format.structure if self.response_format else None
        return given if requested is None else {"response_format": requested, **given}
