"""Incremental detokenisation: from token ids to text, UTF-8 safe and cut exactly at stop strings.

Promises that the text depends on the tokens alone, not on how they are divided into steps. Knows nothing about models.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Any

from outrider.server.partial_match import overlap


class Detokenizer:
    """Turns tokens into text; holds back an incomplete character until its last token."""

    def __init__(self, bytes_of: Callable[[int], bytes], hidden: Collection[int] = (), drops_first_space: bool = False) -> None:
        """`bytes_of` returns the bytes of a token; `hidden` tokens have no text.

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

    @property
    def state(self) -> Any:
        """What the next text depends on. Assign it to take back tokens."""
        return self._at_space, self._decoder.getstate()

    @state.setter
    def state(self, state: Any) -> None:
        self._at_space, decoder = state
        self._decoder.setstate(decoder)

    def flush(self) -> str:
        """The remaining text at the end of an answer; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes text through up to the first stop string; holds back text that may be the start of one."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """With `keep`, the text includes the stop string."""
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""
        self.found: str | None = None  # the stop string that ended the text

    @property
    def stopped(self) -> bool:
        """A stop string has been found."""
        return self.found is not None

    def would_stop(self, text: str) -> bool:
        """Whether `text` would complete a stop string."""
        whole = self._held + text
        return any(stop in whole for stop in self._stops)

    def feed(self, text: str) -> str:
        """The text that no stop string can remove; sets `found` at a stop string."""
        self._held += text
        found = [(start, len(stop), stop) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            start, size, self.found = min(found)
            text, self._held = self._held[: start + size * self._keep], ""
            return text
        hold = max((overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - hold
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def flush(self) -> str:
        """The held-back text at the end of an answer."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer: a detokenizer followed by the stop strings."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
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
        """The stop string that ended the answer."""
        return self._stops.found

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that `tokens` complete, and the number of tokens used: fewer than given if a stop string ends the answer."""
        if exempt := min(self._min_tokens, len(tokens)):
            self._min_tokens -= exempt
            text = self._detokenizer.feed(tokens[:exempt])
            rest, used = self.feed(tokens[exempt:]) if len(tokens) > exempt else ("", 0)
            return text + rest, exempt + used
        state = self._detokenizer.state
        text = self._detokenizer.feed(tokens)
        if not self._stops.would_stop(text):
            return self._stops.feed(text), len(tokens)
        self._detokenizer.state = state  # the tokens are repeated one by one, to find the one that completes a stop string
        text = ""
        for used, token in enumerate(tokens, start=1):
            text += self._stops.feed(self._detokenizer.feed([token]))
            if self.stopped:
                return text, used
        return text, len(tokens)

    def finish(self) -> str:
        """The remaining text at the end; it may still complete a stop string."""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()
