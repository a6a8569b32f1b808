"""Names are safe in a header and short, and sentences are complete."""

from __future__ import annotations

from outrider.server.chat.schemas.notes import MAX_NAME_CHARACTERS, Note, names
from outrider.server.http.ignored import NAME


def test_names_have_no_text_of_clients_that_is_not_a_plain_word() -> None:
    notes = [Note(("f", "a\r\nb: c", "x" * 65, "ok_1-"), "$ref"), Note((), "schema"), Note((), "schema")]
    assert names(notes) == ["f.unknown.unknown.ok_1-.ref", "schema"]
    for path in (("x" * 60,) * 7, ("y",) * 100, ("é", ",", "")):
        name = f"tools.{Note(path, 'pattern').name}"
        assert NAME.fullmatch(name) and len(name) < MAX_NAME_CHARACTERS + 20
