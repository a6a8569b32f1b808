"""Regular expressions of JSON schemas, which are ECMAScript's, as Rust's regex crate reads them.

Promises that what the crate would read differently in silence is written unambiguously: character classes, where it has set
operations and nested classes, and escapes. What only ECMAScript has stays, and is refused where the regex is compiled.
"""

from __future__ import annotations

# The crate reads these escapes as the edges of a word.
PLAIN_ESCAPES = "<>"


def rust_pattern(pattern: str) -> str:
    """The regex in the crate's syntax."""
    written, at = [], 0
    while at < len(pattern):
        if pattern[at] == "[":
            text, at = character_class(pattern, at)
        else:
            text, at = one_character(pattern, at)
        written.append(text)
    return "".join(written)


def one_character(pattern: str, at: int) -> tuple[str, int]:
    """The character or escape at a position, and the position after it."""
    if pattern[at] != "\\":
        return pattern[at], at + 1
    escaped = pattern[at + 1 : at + 2]
    return (escaped if escaped and escaped in PLAIN_ESCAPES else f"\\{escaped}"), at + 2


def character_class(pattern: str, at: int) -> tuple[str, int]:
    """The class that begins at a position, and the position after it."""
    written = "[^" if pattern.startswith("[^", at) else "["
    at += len(written)
    if pattern.startswith("]", at):  # an empty class matches nothing, and its complement everything
        return ("(?s:.)" if written == "[^" else r"[^\s\S]"), at + 1
    begins_range = False  # whether a hyphen here would make a range
    while at < len(pattern) and pattern[at] != "]":
        if pattern[at] == "-" and begins_range and not pattern.startswith("]", at + 1):
            end, at = class_member(pattern, at + 1)
            written, begins_range = f"{written}-{end}", False
            continue
        single = pattern[at] != "\\" or pattern[at + 1 : at + 2] not in "dDsSwWpP"
        member, at = class_member(pattern, at)
        written, begins_range = written + member, single
    return written + pattern[at : at + 1], at + 1


def class_member(pattern: str, at: int) -> tuple[str, int]:
    """The member of a class at a position, and the position after it."""
    text, at = one_character(pattern, at)
    return (f"\\{text}" if text in ("[", "&", "~", "-") else text), at
