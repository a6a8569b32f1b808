"""Tools of a chat: functions, and custom tools, whose input is text.

The model sees a custom tool as a function with one string parameter, `input`; its calls are converted back by `custom_input`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from outrider.server.chat import grammar_job
from outrider.server.chat.grammar_job import INPUT
from outrider.server.chat.tools.lark_pattern import MAX_CHARACTERS
from outrider.server.openai.conversation import FunctionDefinition, FunctionName, NamedTool, Tool, tool_type
from outrider.server.openai.fields import MAX_PARTS, Body, Name, ToolMode


class InputGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class InputFormat(Body):
    """The input of a custom tool: any text, or text of a grammar."""

    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _grammar_matches_type(self) -> InputFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise ValueError("a 'grammar' is required with type 'grammar', and not allowed with type 'text'")
        return self


class CustomDefinition(Body):
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(Body):
    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def name(self) -> str:
        return self.custom.name

    @property
    def as_function(self) -> Tool:
        """The function that the model sees. Its description contains the grammar of the input."""
        grammar = self.custom.format and self.custom.format.grammar
        text = f"Text that matches this {grammar.syntax} grammar:\n{grammar.definition}" if grammar else None
        return self._function({} if text is None else {"description": text})

    @property
    def enforced(self) -> Tool:
        """The function whose calls a grammar enforces, together with `input_grammar`."""
        return self._function({})

    @property
    def input_grammar(self) -> grammar_job.InputGrammar | None:
        """The grammar of the input, as the client wrote it."""
        grammar = self.custom.format and self.custom.format.grammar
        return grammar_job.InputGrammar(grammar.syntax, grammar.definition) if grammar else None

    def _function(self, extra: dict[str, Any]) -> Tool:
        parameters = {
            "type": "object",
            "properties": {INPUT: {"type": "string", **extra}},
            "required": [INPUT],
            "additionalProperties": False,
        }
        definition = FunctionDefinition(name=self.name, description=self.custom.description, parameters=parameters)
        return Tool(type="function", function=definition)


class NamedCustomTool(Body):
    """`tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: FunctionName

    @property
    def name(self) -> str:
        return self.custom.name


def choice_type(choice: Any) -> str | None:
    """The tag of a `tool_choice`."""
    if isinstance(choice, str):
        return "[string]"
    if isinstance(choice, AllowedChoice) or (isinstance(choice, dict) and choice.get("type") == "allowed_tools"):
        return "[allowed_tools]"
    return tool_type(choice)


UNKNOWN_TOOL = "Input should be an object of type 'function' or 'custom'"
AnyTool = Annotated[
    Annotated[Tool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")],
    Discriminator(tool_type, "unknown_tool", UNKNOWN_TOOL),
]
AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("[function]")] | Annotated[NamedCustomTool, Tag("[custom]")],
    Discriminator(tool_type, "unknown_tool", UNKNOWN_TOOL),
]


def check_grammars(tools: list[Tool | CustomTool]) -> list[Tool | CustomTool]:
    """The tools, if their grammars are short. Raises ValueError."""
    formats = [tool.custom.format for tool in tools if isinstance(tool, CustomTool)]
    if sum(len(format.grammar.definition) for format in formats if format and format.grammar) > MAX_CHARACTERS:
        raise ValueError(f"the grammars of all custom tools may have at most {MAX_CHARACTERS} characters; shorten them")
    return tools


Tools = Annotated[list[AnyTool], Field(max_length=MAX_PARTS, fail_fast=True), AfterValidator(check_grammars)]


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyNamedTool], Field(max_length=MAX_PARTS, fail_fast=True)]


class AllowedChoice(Body):
    """`tool_choice` that leaves only some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    ToolMode
    | Annotated[NamedTool, Tag("[function]")]
    | Annotated[NamedCustomTool, Tag("[custom]")]
    | Annotated[AllowedChoice, Tag("[allowed_tools]")],
    Discriminator(
        choice_type, "wrong_type", "Input should be a string, or an object of type 'function', 'custom' or 'allowed_tools'"
    ),
]
