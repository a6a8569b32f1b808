"""The harmony format: an answer is several messages, each with a header that names its channel and perhaps a function.

Messages of the channel "analysis" are reasoning, those to a function are calls, all others are content.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.server.chat.tools.json_calls import FENCE, arguments_call, bare_calls
from outrider.server.chat.tools.parts import SourceParser
from outrider.server.chat.tools.source import Malformed, Reader

START, MESSAGE, CHANNEL = "<|start|>", "<|message|>", "<|channel|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HEADER = re.compile(
    r"(?:<\|start\|>)?(?:assistant)?(?P<to> to=\S+?)?<\|channel\|>(?P<channel>analysis|commentary|final)(?P<then> to=[^\s<]+)?"
    r"\s*+(?:<\|constrain\|>\s*+)?(?:(?:json|code)\s*+)?<\|message\|>"  # possessive: read once
)


class HarmonyParser(SourceParser):
    """Parses one answer after `<|start|>assistant`. Without functions, there are no calls."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        super().__init__()

    def _read(self) -> Reader[None]:
        """Reads messages. What has no header, or a malformed one, is content."""
        while (yield from self._source.peek()):
            self._source.hold()
            with suppress(Malformed):
                yield from self._read_message()
            self._writer.content(self._source.release())
            yield from self._source.until((START, CHANNEL), self._writer.content)

    def _read_message(self) -> Reader[None]:
        """Reads one message. Raises Malformed."""
        header: list[str] = []
        for literal in (START, "assistant"):
            if (yield from self._source.match(literal)):
                header.append(literal)
        if not ((yield from self._source.starts(CHANNEL)) or (yield from self._source.starts(" to="))):
            raise Malformed("header")
        found = yield from self._source.until((MESSAGE, *ENDS, START), header.append)
        if found != MESSAGE:
            raise Malformed("header")
        yield from self._source.expect(MESSAGE)
        match = HEADER.fullmatch("".join(header) + MESSAGE)
        if match is None:
            raise Malformed("header")
        yield from self._read_body(match["channel"], (match["to"] or match["then"] or "").removeprefix(" to="))
        for end in ENDS:
            if (yield from self._source.match(end)):
                break

    def _read_body(self, channel: str, recipient: str) -> Reader[None]:
        """Reads what follows a header. Raises Malformed."""
        name = recipient.removeprefix("functions.")
        if recipient and self._functions and (name in self._functions or name != recipient):
            yield from self._source.skip_space()
            yield from arguments_call(self._source, self._writer, name)
            yield from self._source.skip_space()
        elif recipient:
            raise Malformed("a tool that the request does not have")
        else:
            self._source.release()
            sink = self._writer.reasoning if channel == "analysis" else self._writer.content
            if channel != "analysis" and self._functions:
                yield from self._read_bare_calls()
            yield from self._source.until((*ENDS, START), sink)

    def _read_bare_calls(self) -> Reader[None]:
        """Reads objects that can only be calls, if the message begins with one."""
        self._source.hold()
        yield from self._source.skip_space()
        if (yield from self._source.peek()) in ("{", FENCE[0]):
            with suppress(Malformed):
                yield from bare_calls(self._source, self._writer, self._functions, {"arguments"})
        text = self._source.release()
        for end in ENDS:  # an object without its end has run into the message's
            text = text.replace(end, "")
        self._writer.content(text.lstrip() if self._writer.calls else text)
