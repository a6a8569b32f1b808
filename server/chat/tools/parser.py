"""The parser of all formats that are written in one piece of text: content, a marker, calls, content.

Promises that no text is lost: what does not become a call, or belongs to none, is content with its markers.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outrider.server.chat.tools.formats import BRACKET, FORMATS, ToolFormat, Words, is_slot
from outrider.server.chat.tools.gemma import fields_call
from outrider.server.chat.tools.harmony import HarmonyParser
from outrider.server.chat.tools.json_calls import FENCE, arguments_call, bare_calls, last_calls, object_call
from outrider.server.chat.tools.parts import SourceParser, ToolParser
from outrider.server.chat.tools.python_calls import python_call
from outrider.server.chat.tools.source import DIGITS, NAME, Malformed, Reader
from outrider.server.chat.tools.tagged_calls import tagged_call


def tool_parser(format: str, functions: Mapping[str, Any] | None = None) -> ToolParser:
    """A new parser for one answer in the format of this name. `functions` are the schemas of the tools' parameters, by name."""
    if format == "harmony":
        return HarmonyParser(functions or {})
    return MarkedParser(FORMATS[format], functions or {})


class MarkedParser(SourceParser):
    """Finds calls after a format's opening marker, and at the beginning and the end of the answer without one.

    At the beginning, the format may need no marker; in every format, an object that can only be a call of a tool of the request
    is one there, and in lines that end the answer.
    """

    def __init__(self, format: ToolFormat, functions: Mapping[str, Any]) -> None:
        self._formats = (format, *(FORMATS[name] for name in format.also))
        self._openings = sorted({each.opening for each in self._formats if each.opening})
        self._functions = functions
        self._keys = {"arguments", format.key}
        self._lines = (f"\n{FENCE}", "\n{") if functions else ()  # what calls without a marker begin with
        self._spaces: list[str] = []  # they are not content if a call follows
        super().__init__()

    def _read(self) -> Reader[None]:
        yield from self._read_start()
        while opening := (yield from self._source.until((*self._openings, *self._lines), self._write)):
            if opening in self._lines:
                yield from self._try(last_calls(self._source, self._writer, self._functions, self._keys))
            else:
                yield from self._try(self._read_marked(opening))
        self._writer.content("".join(self._spaces))

    def _read_start(self) -> Reader[None]:
        """Reads calls without a marker, if the answer begins with one."""
        format = self._formats[0]
        yield from self._source.run_space(self._spaces.append)
        if format.bare and (yield from self._begins(BRACKET if BRACKET in format.before else format.first_word)):
            yield from self._try(self._read_calls([format], marked=False))
        elif self._functions and (yield from self._source.peek()) in ("{", FENCE[0]):
            yield from self._try(bare_calls(self._source, self._writer, self._functions, self._keys))

    def _write(self, text: str) -> None:
        """Writes content, except for spaces at its end."""
        content = text.rstrip()
        if content:
            self._writer.content("".join(self._spaces) + content)
            self._spaces.clear()
        self._spaces.append(text[len(content) :])

    def _try(self, reader: Reader[None]) -> Reader[None]:
        """Reads calls. What turns out not to belong to a call is content."""
        calls = self._writer.calls
        self._source.hold("".join(self._spaces))
        self._spaces.clear()
        with suppress(Malformed):
            yield from reader
        rest = self._source.release()
        if self._writer.calls > calls:
            rest = rest.lstrip()
            if not rest:
                yield from self._source.skip_space()
        self._write(rest)

    def _read_marked(self, opening: str) -> Reader[None]:
        """Reads a marker and the calls after it. Raises Malformed."""
        yield from self._source.expect(opening)
        yield from self._read_calls([each for each in self._formats if each.opening == opening], marked=True)

    def _read_calls(self, formats: list[ToolFormat], marked: bool) -> Reader[None]:
        """Reads calls, after the opening marker if they are marked. Raises Malformed."""
        yield from self._source.skip_space()
        for word in dict.fromkeys(word for each in formats for word in each.before if word.strip() and word != each.opening):
            yield from self._source.match(word)
            yield from self._source.skip_space()
        format = yield from self._choose(formats)
        consumed = format.opening if not format.before else ""
        words = tuple(word for word in format.call if word.strip() and word != consumed)
        while words:
            yield from self._read_call(format, words, marked)
            self._source.hold()
            words = yield from self._next_call(format)
        for word in format.after:
            yield from self._source.skip_space()
            if (yield from self._source.match(word)):
                self._source.hold()

    def _choose(self, formats: list[ToolFormat]) -> Reader[ToolFormat]:
        """The format that the text after the opening marker has. Raises Malformed."""
        for format in formats:
            if (yield from self._begins(format.first_word)):
                return format
        raise Malformed("call")

    def _begins(self, word: str) -> Reader[bool]:
        """Whether the text continues with a literal, or with a character that the slot can begin with."""
        if not is_slot(word):
            return (yield from self._source.starts(word))
        character = yield from self._source.peek()
        return character == "{" if word == "%object" else bool(NAME.match(character))

    def _next_call(self, format: ToolFormat) -> Reader[Words]:
        """Reads what separates two calls. Returns the words of the next call, or none."""
        words = tuple(word for word in format.call if word.strip())
        separator = format.between.strip() or ("," if words[0] == "%object" else "")
        yield from self._source.skip_space()
        separated = bool(separator) and (yield from self._source.match(separator))
        yield from self._source.skip_space()
        if words[0] == "%python" and not separated:
            return ()
        return words if (yield from self._begins(words[0])) else ()

    def _read_call(self, format: ToolFormat, words: Words, marked: bool) -> Reader[None]:
        """Reads one call. Raises Malformed."""
        name = ""
        for number, word in enumerate(words):
            yield from self._source.skip_space()
            match word:
                case "%name":
                    name = yield from self._source.word()
                case "%number":
                    yield from self._source.word(DIGITS)
                case "%call_id":
                    if (yield from self._source.match("[CALL_ID]")):
                        yield from self._source.word()
                case "%object":
                    yield from object_call(self._source, self._writer, marked, format.key)
                case "%arguments":
                    yield from arguments_call(self._source, self._writer, name)
                case "%parameters":
                    schema, closing = self._functions.get(name), words[number + 1]
                    yield from tagged_call(self._source, self._writer, name, schema, format.parameter, closing)
                case "%python":
                    yield from python_call(self._source, self._writer)
                case "%fields":
                    yield from fields_call(self._source, self._writer, name)
                case _ if self._source.holds:
                    yield from self._source.expect(word)
                case _:  # models omit what follows the arguments
                    yield from self._source.match(word)
