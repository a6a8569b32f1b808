"""Grammar of arguments that stand between tags, one by one. A text is written as it is, and every other value as JSON.

What a format cannot write leaves the arguments free within its syntax, and is noted.
"""

from dataclasses import dataclass
from typing import Any

from outrider.server.chat.schemas.fields import ArgumentTypes, Fields, fields_of
from outrider.server.chat.schemas.normal import Normal, standalone
from outrider.server.chat.schemas.notes import Note
from outrider.server.chat.schemas.types import ANY, TEXT, parts, texts_of, types_of
from outrider.server.chat.tools.formats import Words
from outrider.server.chat.tools.lark import MAX_UNDECLARED, Lark, json_expression, length_pattern

# The keyword of a note about all arguments of a function.
PARAMETERS = "parameters"
ALTERNATIVES = "there are too many alternatives, or they refer to themselves"
# Matches the name of an argument that no schema declares.
KEY = r'/[^<>"\n]{1,64}/'
# Of a schema of objects, alternatives and what is merged into them are enforced.
ENFORCED = frozenset({"$ref", "additionalProperties", "allOf", "anyOf", "properties", "required", "type"})
IN_NAMES = '<>"\n'


def declared(lark: Lark, name: str, normal: Normal, forbidden: str, *more: str) -> list[Fields] | None:
    """The alternatives of a function's arguments; None, and a note, if they cannot be written.

    No argument's name may have one of the characters `forbidden`, or one of the texts `more`.
    """
    alternatives = fields_of(normal.schema, normal.definitions)
    reason = ALTERNATIVES if alternatives is None else ""
    for argument in (argument for fields in alternatives or () for argument, _, _ in fields):
        if not argument or any(text in argument for text in (*forbidden, *more)) or argument != argument.strip():
            reason = f"the argument {argument!r} cannot be written in the model's format"
    if reason:
        lark.notes.append(Note((name,), PARAMETERS, reason))
        return None
    for part in parts(normal.schema, normal.definitions):
        lark.notes += [Note((name,), keyword) for keyword in part if keyword not in ENFORCED]
    return alternatives


@dataclass(frozen=True)
class TaggedGrammar:
    """Writes the arguments of one function. `words`: the form of one argument."""

    lark: Lark
    words: Words
    name: str
    normal: Normal

    @property
    def end(self) -> str:
        """The marker that ends a value."""
        return next(word for word in self.words[self.words.index("%value") + 1 :] if word.strip())

    def expression(self) -> str:
        alternatives = declared(self.lark, self.name, self.normal, IN_NAMES, self.end)
        types = ArgumentTypes(self.normal)
        choices = {self._fields(fields, types): None for fields in alternatives or [Fields()]}
        return next(iter(choices)) if len(choices) == 1 else "(" + " | ".join(choice or '""' for choice in choices) + ")"

    def _fields(self, fields: Fields, types: ArgumentTypes) -> str:
        parts = []
        for argument, schema, required in fields:
            written = self._argument(self.lark.text(argument), schema, types[argument] == TEXT, argument)
            parts.append(written if required else f"({written})?")
        if fields.more is not False:
            parts.append(f"({self._undeclared(fields.more)}){{0,{MAX_UNDECLARED}}}")
        return " ".join(parts)

    def _undeclared(self, schema: Any) -> str:
        """Expression of an argument that no schema declares."""
        types = types_of(schema, self.normal.definitions)
        if types != ANY:
            return self._argument(KEY, schema, types == TEXT, "additionalProperties")
        as_text = self._argument(KEY, True, True, "")
        return f"({as_text} | {self._argument(KEY, schema, False, '')})" if "%text" in self.words else as_text

    def _argument(self, key: str, schema: Any, is_text: bool, argument: str) -> str:
        """Expression of an argument whose name is the expression `key`."""
        at, after = self.words.index("%value"), self.words.index(self.end, self.words.index("%value"))
        before = "".join(self.words[:at]).replace("%text", "true" if is_text else "false")
        opening, _, closing = before.partition("%key")
        head = f"{self.lark.text(opening)} {key} {self.lark.text(closing)}"
        if not is_text:
            value = json_expression(standalone(schema, self.normal.definitions))
            return f"{head} {value} {self.lark.text(''.join(self.words[at + 1 :]))}"
        newline = "" if self.words[at - 1].strip() else self.words[at - 1]
        return f"{head} {self._text(schema, newline, argument)} {self.lark.text(''.join(self.words[after + 1 :]))}"

    def _text(self, schema: Any, newline: str, argument: str) -> str:
        """Expression of a text and the tag after it, which may begin a line of its own."""
        texts = texts_of(schema, self.normal.definitions)
        unenforced = list(texts.unenforced)
        if texts.values and not any(self.end in value for value in texts.values):
            choices = " | ".join(self.lark.text(value) or '""' for value in texts.values)
            written = f"({choices}) {self.lark.text(f'{newline}{self.end}')}"
        else:
            unenforced += [] if texts.values is None else ["enum"]
            written = self.lark.until(self.end, length_pattern(texts.least, texts.most, not newline))
        self.lark.notes += [Note((self.name, argument), keyword) for keyword in unenforced]
        return written
