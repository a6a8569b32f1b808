"""JSON from outside: checked for size of structure before it is decoded, and decoded strictly.

Promises that no text makes the decoder recurse deeply or build more than `MAX_NODES` containers and fields, and that no number
is NaN or infinite.
"""

import re
from itertools import accumulate
from typing import Any

import msgspec

# This bounds the nesting of objects and arrays. Recursion in Python, pydantic and Jinja allows a few hundred levels.
MAX_DEPTH = 128
# This bounds the number of objects, arrays and fields. In memory, each may take a hundred times its size as text.
MAX_NODES = 1 << 17
NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{}:'))
# A pair of surrogates, a surrogate alone, and any other escape.
ESCAPE = re.compile(rb"(\\u[dD][89abAB]..\\u[dD][c-fC-F]..)|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)
STEPS = {ord(character): step for character, step in zip("[{]}:", (1, 1, -1, -1, 0), strict=True)}


class InvalidJSON(ValueError):
    """The text cannot be decoded. The message completes a sentence that begins with the text's name."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def decode(text: bytes | bytearray | str) -> Any:
    """The value of a JSON text. Raises InvalidJSON."""
    try:
        data = text.encode() if isinstance(text, str) else text
        check_structure(data)
        try:
            return msgspec.json.decode(data)
        except msgspec.DecodeError:
            return msgspec.json.decode(without_halves(data))
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidJSON(f"is not valid JSON: {str(error).removeprefix('JSON is malformed: ')}", "invalid_json") from None


def without_halves(data: bytes | bytearray) -> bytes:
    """The text with U+FFFD in the place of each half of a character: programs cut texts inside of emojis."""
    return ESCAPE.sub(lambda found: rb"\ufffd" if found[2] else found[0], data)


def check_structure(data: bytes | bytearray) -> None:
    """Raises InvalidJSON if `data` is nested too deep or has too many containers and fields."""
    # Without escapes, every quote begins or ends a string. Only the quotes around structural characters are kept.
    marks = data.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, NOT_STRUCTURE).replace(b'""', b"")
    # Structural characters are between any two of the strings that remain, so this many strings are too many.
    too_many = marks.count(b'"') > 2 * MAX_NODES + 2
    structure = b"" if too_many else b"".join(marks.split(b'"')[::2])
    if too_many or sum(map(structure.count, (b"{", b"[", b":"))) > MAX_NODES:
        raise InvalidJSON(f"has more than {MAX_NODES} objects, arrays and fields; send fewer", "too_many")
    if max(accumulate(map(STEPS.__getitem__, structure)), default=0) > MAX_DEPTH:
        raise InvalidJSON(f"is nested deeper than {MAX_DEPTH} levels; flatten it", "too_deep")
