"""Tools of /v1/responses and the choice among them, and their conversion to a chat's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from outrider.server.openai.conversation import FunctionDefinition, FunctionName, NamedTool, Tool
from outrider.server.openai.fields import MAX_PARTS, Body, Name, ToolMode
from outrider.server.openai.responses.items import full_name
from outrider.server.openai.tools import definitions as chat

# The client runs these tools.
OWN_TYPES = ("function", "custom")
ToolType = Annotated[str, Field(max_length=64)]


class FunctionTool(FunctionDefinition):
    type: Literal["function"]

    def to_chat(self) -> Tool:
        """The same tool in a chat's body."""
        return Tool(type="function", function=self)


class InputFormat(Body):
    """The input of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def to_chat(self) -> chat.InputFormat:
        """The same format in a chat's body. Raises pydantic's ValidationError."""
        grammar = {"syntax": self.syntax, "definition": self.definition} if self.type == "grammar" else None
        return chat.InputFormat.model_validate({"type": self.type, "grammar": grammar})

    @model_validator(mode="after")
    def _valid_in_a_chat(self) -> InputFormat:
        self.to_chat()
        return self


class CustomTool(Body):
    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: InputFormat | None = None

    def to_chat(self) -> chat.CustomTool:
        """The same tool in a chat's body."""
        format = self.format.to_chat() if self.format else None
        definition = chat.CustomDefinition(name=self.name, description=self.description, format=format)
        return chat.CustomTool(type="custom", custom=definition)


def tool_type(value: Any) -> str | None:
    """Names the class that validates a tool, or an object that names one."""
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"[{given}]" if given in (*OWN_TYPES, "namespace") else "[hosted]" if isinstance(given, str) else None


Own = Annotated[
    Annotated[FunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")],
    Discriminator(tool_type, "unknown_tool", "Input should be an object of type 'function' or 'custom'"),
]


class NamespaceTool(Body):
    """A group of tools, such as those of an MCP server. A call names the group beside the tool."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[Own], Field(max_length=MAX_PARTS, fail_fast=True)]


class HostedTool(Body):
    """A tool that OpenAI runs and this server does not have. It is left out of the prompt."""

    type: ToolType


class ChosenTool(Body):
    """`tool_choice` that names one tool."""

    type: Literal["function", "custom"]
    name: str

    def to_chat(self) -> NamedTool | chat.NamedCustomTool:
        """The same choice in a chat's body."""
        if self.type == "function":
            return NamedTool(type="function", function=FunctionName(name=self.name))
        return chat.NamedCustomTool(type="custom", custom=FunctionName(name=self.name))


class HostedChoice(Body):
    """`tool_choice` that names a tool which this server does not have."""

    type: ToolType


def choice_type(choice: Any) -> str | None:
    """The tag of a `tool_choice`."""
    if isinstance(choice, str):
        return "[string]"
    given = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    if given in (*OWN_TYPES, "allowed_tools"):
        return "[allowed]" if given == "allowed_tools" else "[chosen]"
    return "[hosted]" if isinstance(given, str) else None


def named_type(choice: Any) -> str | None:
    """The tag of an entry of `allowed_tools`."""
    tag = tool_type(choice)
    return "[chosen]" if tag in ("[function]", "[custom]") else tag and "[hosted]"


NOT_A_TOOL = "Input should be an object whose 'type' is a string"
AnyTool = Annotated[
    Annotated[FunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[HostedTool, Tag("[hosted]")],
    Discriminator(tool_type, "unknown_tool", NOT_A_TOOL),
]
Tools = Annotated[list[AnyTool], Field(max_length=MAX_PARTS, fail_fast=True)]
NamedTools = Annotated[
    list[
        Annotated[
            Annotated[ChosenTool, Tag("[chosen]")] | Annotated[HostedChoice, Tag("[hosted]")],
            Discriminator(named_type, "unknown_tool", NOT_A_TOOL),
        ]
    ],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


class AllowedChoice(Body):
    """`tool_choice` that leaves only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: NamedTools


ToolChoice = Annotated[
    ToolMode
    | Annotated[ChosenTool, Tag("[chosen]")]
    | Annotated[AllowedChoice, Tag("[allowed]")]
    | Annotated[HostedChoice, Tag("[hosted]")],
    Discriminator(choice_type, "wrong_type", "Input should be a string, or an object whose 'type' is a string"),
]


def own_tools(tools: Sequence[AnyTool] | None) -> list[FunctionTool | CustomTool]:
    """The tools that the model can call, under the names that it sees."""
    own: list[FunctionTool | CustomTool] = []
    for tool in tools or ():
        if isinstance(tool, NamespaceTool):
            own += [each.model_copy(update={"name": full_name(tool.name, each.name)}) for each in tool.tools]
        elif not isinstance(tool, HostedTool):
            own.append(tool)
    return own


def namespaces(tools: Sequence[AnyTool] | None) -> dict[str, tuple[str, str]]:
    """The namespace and the name of each tool in a namespace, by the name that the model sees."""
    groups = [tool for tool in tools or () if isinstance(tool, NamespaceTool)]
    return {full_name(group.name, tool.name): (group.name, tool.name) for group in groups for tool in group.tools}


def chat_choice(choice: ToolChoice | None, tools: Sequence[AnyTool] | None) -> Any:
    """The choice in a chat's body. Tools that this server does not have are not required, and not allowed."""
    if isinstance(choice, ChosenTool):
        return choice.to_chat()
    if isinstance(choice, AllowedChoice):
        allowed = [each.to_chat() for each in choice.tools if isinstance(each, ChosenTool)]
        if not allowed:
            return "none"
        return chat.AllowedChoice(type="allowed_tools", allowed_tools=chat.AllowedTools(mode=choice.mode, tools=allowed))
    only_hosted = bool(tools) and not own_tools(tools)
    return None if isinstance(choice, HostedChoice) or (only_hosted and choice == "required") else choice
