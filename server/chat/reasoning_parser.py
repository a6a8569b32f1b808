"""Separates an answer's text into reasoning, content and tool calls while it is generated."""

from collections.abc import Collection
from dataclasses import dataclass

from outrider.server.chat.tools.lark import Lark
from outrider.server.chat.tools.parts import Part, SourceParser, ToolParser, merge_parts
from outrider.server.chat.tools.source import Reader

# These variables of chat templates switch reasoning on or off.
THINKING_ARGUMENTS = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning, which comes first in an answer."""

    name: str
    opening: str  # a prompt that ends with it has opened the reasoning
    closing: str
    markers: tuple[str, ...]  # a chat template has this format if it contains all of them
    wrapper: tuple[str, str] | None = None  # texts around the content after the reasoning
    channels: bool = False  # the whole answer consists of harmony's messages

    def prefix(self, special: dict[str, int], calls: bool) -> str:
        """Lark grammar of the reasoning and, as "@answer", what follows: tool calls or content."""
        lark = Lark(special)
        if self.channels:
            analysis = f"{lark.text('<|channel|>analysis<|message|>')} {lark.until('<|end|>')} {lark.text(self.opening)}"
            final = "" if calls else lark.text("<|channel|>final<|message|>")
            start = f"({analysis})? {final} @answer"
        else:
            start = f"{lark.until(self.closing)} /\\n{{0,2}}/ @answer"
        return "\n".join([f"start: {start}", *lark.rules])


THINK = ReasoningFormat("think", "<think>", "</think>", ("<think>",))
REASONING_FORMATS = (
    ReasoningFormat("harmony", "<|start|>assistant", "<|end|>", ("<|channel|>", "<|message|>"), channels=True),
    ReasoningFormat("gemma", "<|channel>thought", "<channel|>", ("<|channel>thought",)),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", ("<seed:think>",)),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    ReasoningFormat("granite", "<think>", "</think>", ("<think>", "<response>"), ("<response>", "</response>")),
    THINK,
)


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The format of the reasoning that a chat template knows; None if it knows none."""
    return next((each for each in REASONING_FORMATS if all(marker in template for marker in each.markers)), None)


def thinking_arguments(template: str, allowed: Collection[str]) -> list[str]:
    """The variables with which this chat template switches reasoning on or off, as far as requests may set them."""
    return [name for name in THINKING_ARGUMENTS if name in allowed and name in template]


class ReasoningParser(SourceParser):
    """Parses one answer. Reasoning, if any, comes first; tool calls may follow.

    The parts do not depend on how the text is cut into pieces.
    """

    def __init__(
        self,
        tools: ToolParser | None = None,
        may_reason: bool = False,
        reasoning: bool = False,
        format: ReasoningFormat = THINK,
    ) -> None:
        """`may_reason`: the answer may begin with reasoning; `reasoning`: the prompt has already opened it."""
        super().__init__()
        self._tools = tools
        self._may_reason, self._reasoning = may_reason, reasoning
        self._format = format
        self._spaces: list[str] = []  # spaces at the end of the reasoning so far; they are not part of it

    def finish(self) -> list[Part]:
        parts = super().finish()
        return merge_parts(parts + (self._tools.finish() if self._tools else []))

    def _read(self) -> Reader[None]:
        reasons = self._reasoning
        if self._may_reason and not reasons:
            self._source.hold()
            yield from self._source.skip_space()
            reasons = yield from self._source.match(self._format.opening)
            start = self._source.release()
            self._write_content("" if reasons else start)
        if reasons:
            yield from self._source.skip_space()
            yield from self._source.until((self._format.closing,), self._write_reasoning)
            yield from self._source.match(self._format.closing)
            yield from self._source.skip_space()
        may_wrap = reasons or self._may_reason
        if may_wrap and self._format.wrapper and (yield from self._source.match(self._format.wrapper[0])):
            yield from self._source.skip_space()
            yield from self._source.until(self._format.wrapper[1:], self._write_content)
            yield from self._source.match(self._format.wrapper[1])
        yield from self._source.until((), self._write_content)

    def _write_reasoning(self, text: str) -> None:
        reasoning = text.rstrip()
        if reasoning:
            self._writer.reasoning("".join(self._spaces) + reasoning)
            self._spaces.clear()
        self._spaces.append(text[len(reasoning) :])

    def _write_content(self, text: str) -> None:
        if self._tools is None:
            self._writer.content(text)
        elif text:
            self._writer.add(self._tools.feed(text))
