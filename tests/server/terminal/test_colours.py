"""Colours: every source has one, and text is split by the tokens of a step."""

from __future__ import annotations

from typing import Any

from outrider.drafters.interface import Source
from outrider.server.terminal.colours import CODES, SourceReader, legend


def trace(*accepted: tuple[str, str], bonus: str | None = None, rejected: str = "no") -> dict[str, Any]:
    """The trace of a step that drafted one wrong token before those that were accepted."""
    texts, sources = zip(("trigram", rejected), *((source, text) for text, source in accepted), strict=True)
    return {
        "draft": {"texts": list(sources), "sources": list(texts)},
        "accepted": list(range(1, len(accepted) + 1)),
        "bonus": None if bonus is None else {"token": 1, "text": bonus},
    }


def test_every_source_has_its_colour() -> None:
    assert set(CODES) == {source.label for source in Source}
    assert len(set(CODES.values())) == len(CODES)
    assert "\x1b[32mtrigram\x1b[0m" in legend()


def test_a_step_after_one_with_other_text_is_split_again() -> None:
    reader = SourceReader()
    reader.record(trace(("\ufffd", "lookup"), ("\ufffd", "lookup")))
    assert list(reader.split("é")) == [("é", None)]
    reader.record(trace(("a", "lookup")))
    assert list(reader.split("a")) == [("a", "lookup")]
