"""Request bodies of /v1/messages and /v1/messages/count_tokens, validated as Anthropic does.

Unknown fields are ignored, and so are `cache_control`, `metadata`, `service_tier`, `container` and `context_management`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from outrider.server.openai.conversation import MEDIA, ArgumentText, PredictionBody, placeholder
from outrider.server.openai.fields import (
    MAX_ENTRIES,
    MAX_PARTS,
    TEXT_OR_LIST,
    Body,
    CheckedBody,
    FreeForm,
    Name,
    Strings,
    Text,
    Unsupported,
)


class TextBlock(Body):
    type: Literal["text"]
    text: str


class MediaBlock(Body):
    """Content that the model cannot read. Its data are dropped, and a line of text stands for it."""

    type: str

    @property
    def text(self) -> str:
        return placeholder(self.type)


class PictureSource(Body):
    type: str  # base64, url or file
    media_type: str = ""
    data: str | None = None  # in base64
    url: str | None = None


class PictureBlock(MediaBlock):
    """A picture. Where the model cannot read it, it is content like the other media."""

    source: PictureSource

    @property
    def url(self) -> str | None:
        """Its URL; None if it is a stored file."""
        return self.source.url if self.source.data is None else f"data:{self.source.media_type};base64,{self.source.data}"


class TextSource(Body):
    type: Literal["text"]
    data: str


class TextDocument(Body):
    """A document that is text."""

    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.data)))


class SearchResultBlock(Body):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class ThinkingBlock(Body):
    """Reasoning of an earlier turn. Its signature is not checked: the server has no secret that clients must not see."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Reasoning that another server has encrypted. It is left out of the prompt."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Body):
    """A call in an earlier turn of the assistant."""

    type: Literal["tool_use"]
    id: str | None = None
    name: str
    input: ArgumentText = ""  # an object as JSON


class ToolReferenceBlock(Body):
    """The name of a tool that a client's tool search has found."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return f"Found tool: {self.tool_name}"


def block_type(block: Any) -> str:
    given = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    if isinstance(block, TextDocument) or (given == "document" and is_text(block)):
        return "[document]"
    if isinstance(given, str) and given in MEDIA and given != "image":
        return "[media]"
    return f"[{given}]" if isinstance(given, str) else ""


def is_text(document: Any) -> bool:
    source = document.get("source") if isinstance(document, dict) else None
    return isinstance(source, dict) and source.get("type") == "text"


def check_block(block: Any) -> Any:
    """The block, if this server supports its type. Raises ValueError."""
    given = block_type(block)[1:-1][:40]
    if given not in (*BLOCK_TYPES, "image", "media"):
        raise ValueError(f"this server supports content of the types {', '.join(BLOCK_TYPES)} and media, not {given!r}")
    return block


def check_system_block(block: Any) -> Any:
    """The block, if it is text. Raises ValueError."""
    if block_type(block) != "[text]":
        raise ValueError("a system prompt can have content of the type 'text' only; put other content into a user's message")
    return block


BLOCK_TYPES = (
    "text",
    "thinking",
    "redacted_thinking",
    "tool_use",
    "tool_result",
    "tool_reference",
    "document",
    "search_result",
)
CHECKED = BeforeValidator(check_block)
BLOCK = Discriminator(block_type, "wrong_block", "This type of content is not allowed here")

AnyBlock = (
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[TextDocument, Tag("[document]")]
    | Annotated[SearchResultBlock, Tag("[search_result]")]
    | Annotated[PictureBlock, Tag("[image]")]
    | Annotated[MediaBlock, Tag("[media]")]
)
ResultBlock = Annotated[AnyBlock | Annotated[ToolReferenceBlock, Tag("[tool_reference]")], BLOCK, CHECKED]
ResultBlocks = Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str | None = None
    content: Annotated[Text | Annotated[ResultBlocks, Tag("[array]")], TEXT_OR_LIST] | None = None
    is_error: bool | None = None

    @property
    def blocks(self) -> list[ResultBlock]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content or []


Block = Annotated[
    AnyBlock
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedThinkingBlock, Tag("[redacted_thinking]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")],
    BLOCK,
    CHECKED,
]
Blocks = Annotated[list[Block], Field(max_length=MAX_ENTRIES, fail_fast=True)]
SystemBlock = Annotated[TextBlock, BeforeValidator(check_system_block)]
SystemBlocks = Annotated[list[SystemBlock], Field(max_length=MAX_PARTS, fail_fast=True)]

# These blocks of a user's turn are text, or a line stands for them.
ReadBlock = TextBlock | TextDocument | SearchResultBlock | ToolReferenceBlock | MediaBlock
READ_BLOCKS = (TextBlock, TextDocument, SearchResultBlock, MediaBlock)
ALLOWED_BLOCKS = {
    "user": (*READ_BLOCKS, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class MessageParam(Body):
    """One turn. Some clients also send system messages in mid-conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[Text | Annotated[Blocks, Tag("[array]")], TEXT_OR_LIST]

    @property
    def blocks(self) -> list[Block]:
        return [TextBlock(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> MessageParam:
        for block in self.blocks:
            if not isinstance(block, ALLOWED_BLOCKS[self.role]):
                raise ValueError(f"a message of the role {self.role!r} cannot have content of the type {block.type!r}")
        return self


class CustomTool(Body):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: Name
    description: str | None = None
    input_schema: FreeForm
    strict: bool | None = None


class ServerTool(Body):
    """A tool that Anthropic's servers run or define, such as `web_search_20250305`. It is left out of the prompt."""

    type: str
    name: str | None = None


def tool_type(tool: Any) -> str:
    """Names the class that validates a tool."""
    given = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "[custom]" if given in (None, "custom") else "[server]"


AnyTool = Annotated[
    Annotated[CustomTool, Tag("[custom]")] | Annotated[ServerTool, Tag("[server]")],
    Discriminator(tool_type, "wrong_tool", "Input should be a tool"),
]


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # set if the type is "tool"
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise ValueError("type 'tool' needs a 'name'")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[FreeForm, Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class CountTokensBody(CheckedBody):
    """POST /v1/messages/count_tokens: the fields that make up the prompt."""

    unsupported: ClassVar[Unsupported] = {"mcp_servers": (None, [])}

    model: str
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_ENTRIES, fail_fast=True)]
    system: Annotated[Text | Annotated[SystemBlocks, Tag("[array]")], TEXT_OR_LIST] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def system_blocks(self) -> list[TextBlock]:
        return [TextBlock(type="text", text=self.system)] if isinstance(self.system, str) else self.system or []

    @property
    def custom_tools(self) -> list[CustomTool]:
        """The tools that the model gets."""
        return [tool for tool in self.tools or () if isinstance(tool, CustomTool)]

    @property
    def ignored(self) -> list[str]:
        """Names of content left out of the prompt: tools that the client does not run, and media that the model cannot read."""
        names = [f"tools.{tool.type}" for tool in self.tools or () if isinstance(tool, ServerTool)]
        blocks = (block for turn in self.messages for block in turn.blocks)
        inner = (each for block in blocks for each in (block.blocks if isinstance(block, ToolResultBlock) else [block]))
        names += [f"messages.{block.type}" for block in inner if isinstance(block, MediaBlock | RedactedThinkingBlock)]
        return list(dict.fromkeys(names))

    @property
    def thinks(self) -> bool:
        """Whether the model should reason before it answers. As in Anthropic's API, it does so only on request."""
        return self.thinking is not None and self.thinking.type != "disabled"


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Strings | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=1 << 31)] | None = None
    stream: bool | None = None
    prediction: PredictionBody | None = None  # OpenAI's
