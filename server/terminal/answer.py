"""One answer as the terminal shows it: its text as it arrives, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.server.terminal.client import NO_CHUNK, ChatError, printable
from outrider.server.terminal.wrapping import Wrapper

# These exceptions are raised for fields that are missing or of another type.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)


@dataclass
class Answer:
    """The answer to one question, so far."""

    write: Callable[[str], None]  # shows text at once
    clock: Callable[[], float] = time.monotonic
    wrapper: Wrapper | None = None  # None = the lines are not broken
    text: str = ""  # text without reasoning
    first_seconds: float | None = None  # time from the question to the first text
    seconds: float = 0.0  # time from the question to the end
    usage: dict[str, Any] = field(default_factory=dict)
    speculation: dict[str, Any] = field(default_factory=dict)

    def receive(self, chunks: Iterator[dict[str, Any]]) -> None:
        """Shows the chunks as they arrive. Raises ChatError, what `chunks` raises, and KeyboardInterrupt."""
        asked = self.clock()
        try:
            for chunk in chunks:
                for content, shown in self._read(chunk):
                    if shown and self.first_seconds is None:
                        self.first_seconds = self.clock() - asked
                    self.text += content
                    self._show(shown)
        finally:
            self.seconds = self.clock() - asked

    def stats(self) -> str:
        """The cost of the answer as text."""
        if not self.usage:
            return f"The answer was stopped after {self.seconds:.2f} s."
        try:
            return printable(self._figures())
        except MALFORMED:
            return f"The answer took {self.seconds:.2f} s; the server reports its cost in a form that the chat cannot read."

    def _read(self, chunk: dict[str, Any]) -> list[tuple[str, str]]:
        """The text of each choice: the part that belongs to the answer, and the part to show. Raises ChatError."""
        texts = []
        try:
            for choice in chunk["choices"]:
                content, reasoning = (str(choice["delta"].get(name) or "") for name in ("content", "reasoning_content"))
                texts.append((content, content or reasoning))
        except MALFORMED:
            raise ChatError(NO_CHUNK) from None
        self.usage = chunk.get("usage") or self.usage
        self.speculation = chunk.get("speculation") or self.speculation
        return texts

    def _figures(self) -> str:
        tokens = self.usage["completion_tokens"]
        lines = [
            f"{tokens} tokens in {self.seconds:.2f} s, {tokens / max(self.seconds, 1e-6):.0f} tokens/s, "
            f"first text after {1e3 * (self.first_seconds or self.seconds):.0f} ms",
            f"{self.usage['prompt_tokens']} prompt tokens, "
            f"{(self.usage.get('prompt_tokens_details') or {}).get('cached_tokens', 0)} of them cached",
        ]
        if self.speculation:
            accepted, drafted = self.speculation["accepted_tokens"], self.speculation["drafted_tokens"]
            shares = [f"{source} {accepted.get(source, 0)} of {count}" for source, count in drafted.items()]
            lines.append(f"{self.speculation['steps']} steps, {self.speculation['mean_tokens_per_step']:.2f} tokens per step")
            lines.append(f"accepted drafts: {', '.join(shares) or 'nothing was drafted'}")
        return "\n".join(lines)

    def _show(self, text: str) -> None:
        shown = printable(text)
        if shown:
            self.write(self.wrapper.feed(shown) if self.wrapper else shown)
