"""Text that the terminal may show."""

from __future__ import annotations

from outrider.server.terminal.printable import one_line, printable


def test_control_characters_are_dropped() -> None:
    assert printable("a\x1b[2J\x07\u009b\n\tb\u00e9") == "a[2J\n\tb\u00e9"
    assert one_line(" a\x1b[2J\r\n\t b ") == "a[2J b"
