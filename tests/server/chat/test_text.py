"""The overlap of a text's end with a marker's beginning."""

import pytest

from server.chat.text import overlap


@pytest.mark.parametrize(
    ("text", "marker", "expected"),
    [
        ("abc<th", "<think>", 3),
        ("<think>", "<think>", 0),
        ("abc", "<think>", 0),
        ("", "x", 0),
        ("aab", "abab", 2),
        ("x<", "<", 0),
    ],
)
def test_overlap(text: str, marker: str, expected: int) -> None:
    assert overlap(text, marker) == expected
