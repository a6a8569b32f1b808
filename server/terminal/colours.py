"""Colours of an answer's text by the drafter that drafted it; bonus tokens are plain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# ANSI colours, by label of `outrider.drafters.interface.Source`.
CODES = {
    "none": "37",
    "trigram": "32",
    "retrieval": "36",
    "lookup": "33",
    "lookahead": "35",
    "prediction": "34",
    "draft": "31",
    "grammar": "90",
    "merged": "91",
    "noise": "95",
    "other": "94",
}


def paint(text: str, source: str | None) -> str:
    """The text in the colour of its source; None is plain. A line break ends no colour, so each piece ends its own."""
    code = CODES.get(source or "")
    return f"\x1b[{code}m{text}\x1b[0m" if code and text else text


def unpainted(text: str, _: str | None) -> str:
    """The text without a colour."""
    return text


def legend() -> str:
    """The sources in their colours."""
    return " ".join(paint(source, source) for source in CODES if source != "none") + " (bonus tokens are plain)"


class SourceReader:
    """Splits an answer's text by source, with the traces of its steps."""

    def __init__(self) -> None:
        self._expected: list[tuple[str, str | None]] = []  # text and source of tokens whose text has not arrived

    def record(self, trace: dict[str, Any]) -> None:
        """Takes the trace of a step, before its text."""
        draft = trace["draft"]
        self._expected += [(str(draft["texts"][row]), str(draft["sources"][row])) for row in trace["accepted"]]
        if trace.get("bonus"):
            self._expected.append((str(trace["bonus"]["text"]), None))

    def split(self, text: str) -> Iterator[tuple[str, str | None]]:
        """The parts of the next text with their sources.

        The text of a token may differ from its part of the answer, for example if a character has several tokens. The rest of
        the text is then plain, and the next step starts anew.
        """
        while text and self._expected:
            token, source = self._expected.pop(0)
            if text.startswith(token):
                yield token, source
                text = text[len(token) :]
            elif token.startswith(text):
                self._expected.insert(0, (token[len(text) :], source))
                yield text, source
                return
            else:
                self._expected.clear()
        if text:
            yield text, None
