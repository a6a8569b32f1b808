"""Regular expressions that the regex crate would read differently in silence."""

from __future__ import annotations

import pytest

from outrider.server.chat.schemas.patterns import rust_pattern


@pytest.mark.parametrize(
    ("pattern", "written"),
    [
        (r"^[a-z0-9_.-]+\[\]$", r"^[a-z0-9_.\-]+\[\]$"),
        ("[^&&~~]", r"[^\&\&\~\~]"),
        ("[+--]", r"[+-\-]"),
        (r"[\w-.]", r"[\w\-.]"),
        ("[a-c-e]", r"[a-c\-e]"),
        ("[]", r"[^\s\S]"),
        ("[^]a", "(?s:.)a"),
        (r"\<a\>", "<a>"),
        ("a\\", "a\\"),
    ],
)
def test_patterns(pattern: str, written: str) -> None:
    assert rust_pattern(pattern) == written
