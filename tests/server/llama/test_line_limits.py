"""Completions end at a line of less indentation, and at the end of a line once their time is over."""

from __future__ import annotations

import pytest

from outrider.server.llama.line_limits import LineLimits


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a:\n    b\n\t\t\t\tc", None),
        ("a\nb", "a\n"),  # the first line has any indentation
        ("a\n  b", "a\n  "),
        ("    a\n    b\n\n    c", "    a\n    b\n"),  # an empty line has none
        ("a\n      ", None),
    ],
)
def test_the_indentation(text: str, expected: str | None, size: int) -> None:
    limits, kept = LineLimits(4, 0), ""
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        if cut := limits.feed(piece):
            assert cut.finish == "length" and kept + piece[: cut.characters] == expected
            return
        kept += piece
    assert expected is None


def test_after_its_time_an_answer_ends_with_the_line() -> None:
    clock = Clock()
    limits = LineLimits(0, 0.5, clock)
    assert limits.feed("a\nb\n") is None  # the time begins with the first text
    clock.now += 0.4
    assert limits.feed("c\nd") is None
    clock.now += 0.2
    assert limits.feed("e") is None
    assert limits.feed("f\ng\n") == (2, "length")
