"""Incremental detokenisation: from token ids to text, UTF-8 safe and cut exactly at stop strings.

Promises that the text depends on the tokens alone, not on how they are divided into steps, and that a stop string ends it
although it is the text of hidden tokens, or has such text in it. Knows nothing about models.
"""

import codecs
from collections.abc import Callable, Collection, Iterator, Sequence

from outrider.server.chat.tools.source import overlap

# Kinds of characters: of shown text, and the first and the others of a hidden token.
SHOWN, HIDDEN, INNER = "s", "h", "i"


class Detokenizer:
    """Turns tokens into text; holds back an incomplete character until its last token."""

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: Collection[int] = (), drops_first_space: bool = False) -> None:
        """`bytes_of` returns the bytes of a token; the text of `hidden` tokens is not shown.

        With `drops_first_space`, a space with which the text starts is left out.
        """
        self._bytes_of = bytes_of
        self._hidden = hidden
        self._at_space = drops_first_space  # the text has not started yet
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; empty if they end inside a character."""
        data = b"".join(self._bytes_of(token) for token in tokens if token not in self._hidden)
        if data and self._at_space:
            data, self._at_space = data.removeprefix(b" "), False
        return self._decoder.decode(data)

    def hides(self, token: int) -> bool:
        """Whether the token's text is not shown."""
        return token in self._hidden

    def text_of(self, token: int) -> str:
        return self._bytes_of(token).decode("utf-8", "replace")

    def flush(self) -> str:
        """The remaining text at the end of an answer; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes shown text through up to the first stop string; holds back text that may be the start of one.

    A stop string may be shown text, or text with that of hidden tokens, none of which it cuts.
    """

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """`keep` includes the stop string in the text."""
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""  # with hidden text
        self._kinds = ""  # of each character
        self.found: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        return self.found is not None

    def feed(self, text: str, hidden: str = "") -> str:
        """The shown text that no stop string can remove, after `text` and a `hidden` token; sets `found` at a stop string."""
        self._held += text + hidden
        self._kinds += SHOWN * len(text) + (HIDDEN + INNER * (len(hidden) - 1) if hidden else "")
        views: list[tuple[str, Sequence[int]]] = [(self._held, range(len(self._held)))]
        if HIDDEN in self._kinds:
            shown = [at for at, kind in enumerate(self._kinds) if kind == SHOWN]
            views.append(("".join(self._held[at] for at in shown), shown))
        found = [
            (places[at], len(stop), stop)
            for stop in self._stops
            for view, places in views
            for at in occurrences(view, stop)
            if self._is_boundary(places[at]) and self._is_boundary(places[at + len(stop) - 1] + 1)
        ]
        if found:
            start, _, self.found = min(found)
            return self._release(start) + self.found * self._keep
        holds = [places[-size] for stop in self._stops for view, places in views if (size := overlap(view, stop))]
        return self._release(min(holds, default=len(self._held)))

    def flush(self) -> str:
        """The held-back text at the end of an answer."""
        return self._release(len(self._held))

    def _is_boundary(self, at: int) -> bool:
        """Whether no hidden token is around the place between two characters."""
        return self._kinds[at : at + 1] != INNER

    def _release(self, end: int) -> str:
        """Removes what is held before `end`, and returns what is shown of it."""
        text = "".join(self._held[at] for at in range(end) if self._kinds[at] == SHOWN)
        self._held, self._kinds = self._held[end:], self._kinds[end:]
        return text


def occurrences(text: str, part: str) -> Iterator[int]:
    """The indices at which `part` begins in `text`."""
    at = -1
    while (at := text.find(part, at + 1)) >= 0:
        yield at


class AnswerText:
    """The text of one answer: a detokenizer followed by the stop strings."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], keep_stop: bool = False, min_tokens: int = 0) -> None:
        """Stop strings count only after the first `min_tokens` tokens."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, keep_stop)
        self._min_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        """A stop string has been found."""
        return self._stops.stopped

    @property
    def stop_string(self) -> str | None:
        return self._stops.found

    def feed(self, tokens: Sequence[int], ends: bool = False) -> tuple[str, int]:
        """The text that `tokens` complete, and the number of tokens used: fewer than given if a stop string ends the answer.

        If the last one `ends` the answer, its text is not shown.
        """
        text = ""
        for used, token in enumerate(tokens, start=1):
            is_hidden = self._detokenizer.hides(token) or (ends and used == len(tokens))
            shown = "" if is_hidden else self._detokenizer.feed([token])
            if self._min_tokens:
                self._min_tokens -= 1
                text += shown
                continue
            text += self._stops.feed(shown, self._detokenizer.text_of(token) if is_hidden else "")
            if self.stopped:
                return text, used
        return text, len(tokens)

    def finish(self) -> str:
        """The remaining text at the end; it may still complete a stop string."""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()
