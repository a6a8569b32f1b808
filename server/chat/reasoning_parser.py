"""What a chat answer's growing text is: reasoning, content, tool calls."""

from __future__ import annotations

from server.chat.tool_parsers import Part, ToolParser, merged
from server.partial_match import overlap

OPENING, CLOSING = "<think>", "</think>"


class ReasoningParser:
    """Reads one answer. Reasoning stands at its beginning, if anywhere; calls may follow."""

    def __init__(self, tools: ToolParser | None = None, reasons: bool = False, reasoning: bool = False) -> None:
        """`reasons`: the model may begin with reasoning; `reasoning`: the prompt has opened it already."""
        self._tools = tools
        self._state = "reasoning" if reasoning else "start" if reasons else "content"
        self._held = ""
        self._told = False  # some reasoning has been passed on

    def feed(self, text: str) -> list[Part]:
        """What is certain now."""
        self._held += text
        parts: list[Part] = []
        if self._state == "start":
            begun = self._held.lstrip()
            if OPENING.startswith(begun[: len(OPENING)]) and len(begun) < len(OPENING):
                return []
            self._state = "reasoning" if begun.startswith(OPENING) else "content"
            if self._state == "reasoning":
                self._held = begun.removeprefix(OPENING)
        if self._state == "reasoning":
            at = self._held.find(CLOSING)
            size = at if at >= 0 else len(self._held) - overlap(self._held, CLOSING)
            thought = self._held[:size]
            # Spaces wait: those around the reasoning are not part of it.
            shown = thought.rstrip() if self._told else thought.strip()
            if shown:
                self._told = True
                parts.append(Part("reasoning", shown))
            self._held = self._held[at + len(CLOSING) :].lstrip() if at >= 0 else self._kept(thought, size)
            if at >= 0:
                self._state = "after"
        if self._state == "after":
            self._held = self._held.lstrip()
            self._state = "content" if self._held else "after"
        if self._state == "content":
            text, self._held = self._held, ""
            parts += self._content(text)
        return merged(parts)

    def finish(self) -> list[Part]:
        """What is left at the end."""
        left, self._held = self._held, ""
        parts = [Part("reasoning", left)] if left and self._state == "reasoning" and left.strip() else []
        if self._state in ("start", "content"):
            parts += self._content(left)
        return merged(parts + (self._tools.finish() if self._tools else []))

    def _kept(self, thought: str, size: int) -> str:
        """What waits of the held text once `thought`, its first `size` characters, has been read."""
        spaces = len(thought) - len(thought.rstrip()) if self._told else 0
        return self._held[size - spaces :]

    def _content(self, text: str) -> list[Part]:
        if not text:
            return []
        return self._tools.feed(text) if self._tools else [Part("content", text)]
