"""Lines are broken between words, on a terminal that the tests imitate."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.terminal.chat import Wrapper

WIDE = "漢字"


def screen(written: str, columns: int) -> list[str]:
    """The rows of a terminal. Its cursor stays on the last character of a full row until the next one."""
    rows, column = [[""] * columns], 0
    for code, letter, character in re.findall(r"\x1b\[(\d*)([DKm])|([\s\S])", written):
        if character == "\n":
            rows.append([""] * columns)
            column = 0
        elif character:
            width = 2 if character in WIDE else 1
            if column + width > columns:
                rows.append([""] * columns)
                column = 0
            rows[-1][column] = character
            column += width
        elif letter == "D":
            column = max(0, min(column, columns - 1) - int(code))
        elif letter == "K":
            column = min(column, columns - 1)
            rows[-1][column:] = [""] * (columns - column)
    return ["".join(row) for row in rows]


def wrapped(parts: list[str], columns: int) -> list[str]:
    wrapper = Wrapper(lambda: columns)
    return screen("".join(wrapper.feed(part) for part in parts), columns)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("one two three", ["one two", "three"]),
        ("1234567 9", ["1234567 ", "9"]),
        ("x yyyyyyyyyyyy z", ["x", "yyyyyyyy", "yyyy z"]),
        ("abc漢字漢字", ["abc漢字", "漢字"]),
        ("```\none two three\n```\none two three", ["```", "one two ", "three", "```", "one two", "three"]),
    ],
)
def test_words_are_taken_to_the_next_line(text: str, rows: list[str]) -> None:
    for parts in ([text], list(text), re.findall(r"[\s\S]{1,3}", text)):
        assert [row.rstrip() for row in wrapped(parts, 8)] == [row.rstrip() for row in rows]


@given(st.text("ab漢 \n", max_size=60), st.lists(st.integers(1, 5), min_size=60, max_size=60), st.integers(3, 12))
def test_no_word_is_cut_that_fits_a_line(text: str, sizes: list[int], columns: int) -> None:
    parts, rest = [], text
    for size in sizes:
        parts.append(rest[:size])
        rest = rest[size:]
    rows = wrapped(parts, columns)
    assert rows == wrapped([text], columns)
    assert "".join("".join(rows).split()) == "".join(text.split())
    words = {word for row in rows for word in re.split(r"[\s漢]+", row) if word}
    assert words == {word for word in re.split(r"[\s漢]+", text) if word} or any(len(word) > columns for word in text.split())
