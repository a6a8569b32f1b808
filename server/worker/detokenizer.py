"""From token ids to text as it grows: UTF-8 safe, and cut exactly at stop strings.

Promises that the pieces add up to what decoding all tokens at once would give, up to the stop. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from server.chat.text import overlap

REPLACEMENT = "\ufffd"


class TokenDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Turns tokens into text; an unfinished character is held until the tokens that complete it."""

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._start = 0  # decoding starts here: far enough back for the tokenizer's rules about spaces
        self._done = 0  # tokens whose text has been returned

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that `tokens` complete; nothing at all where they end within a character."""
        self._ids.extend(tokens)
        before, now = self._decode(self._done), self._decode(len(self._ids))
        if now.endswith(REPLACEMENT) or len(now) <= len(before):
            return ""
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def take_back(self, count: int, done: tuple[int, int]) -> None:
        """Forgets the last `count` tokens; `done` is what `progress` was before them."""
        del self._ids[len(self._ids) - count :]
        self._start, self._done = done

    @property
    def progress(self) -> tuple[int, int]:
        """How far the tokens have become text."""
        return self._start, self._done

    def flush(self) -> str:
        """The held text, unfinished characters replaced by U+FFFD; for the end of an answer."""
        before, now = self._decode(self._done), self._decode(len(self._ids))
        self._start, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _decode(self, stop: int) -> str:
        return self._tokenizer.decode(self._ids[self._start : stop], skip_special_tokens=self._skip)


class StopStrings:
    """Passes text through until the first of the stop strings, holding back what may be the start of one."""

    def __init__(self, stops: Sequence[str], keep: bool = False) -> None:
        """With `keep`, the text ends with the stop string, else before it."""
        self._stops = [stop for stop in stops if stop]
        self._keep = keep
        self._held = ""
        self.stopped = False

    def finds(self, text: str) -> bool:
        """Whether `text` would complete a stop string."""
        whole = self._held + text
        return any(stop in whole for stop in self._stops)

    def feed(self, text: str) -> str:
        """The text that is certain now; sets `stopped` at a stop string."""
        self._held += text
        found = [(at, len(stop)) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            at, size = min(found)
            certain, self._held = self._held[: at + size * self._keep], ""
            return certain
        hold = max((overlap(self._held, stop) for stop in self._stops), default=0)
        certain, self._held = self._held[: len(self._held) - hold], self._held[len(self._held) - hold :]
        return certain

    def flush(self) -> str:
        """The held text; for the end of an answer."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """The text of one answer: detokenizer and stop strings in a row."""

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stops: Sequence[str],
        skip_special_tokens: bool = True,
        keep_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Stop strings are looked for in what follows the first `min_tokens` tokens."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._stops = StopStrings(stops, keep_stop)
        self._min_tokens = min_tokens

    @property
    def stopped(self) -> bool:
        """A stop string has been reached."""
        return self._stops.stopped

    def feed(self, tokens: Sequence[int]) -> tuple[str, int]:
        """The text that `tokens` complete, and how many of them were used: fewer than given after a stop string."""
        if free := min(self._min_tokens, len(tokens)):
            self._min_tokens -= free
            text = self._detokenizer.feed(tokens[:free])
            rest, used = self.feed(tokens[free:]) if len(tokens) > free else ("", 0)
            return text + rest, free + used
        progress = self._detokenizer.progress
        text = self._detokenizer.feed(tokens)
        if text and not self._stops.finds(text):
            return self._stops.feed(text), len(tokens)
        # One by one, to see which token completes a stop string or leaves a character unfinished.
        self._detokenizer.take_back(len(tokens), progress)
        text = ""
        for used, token in enumerate(tokens, start=1):
            text += self._stops.feed(self._detokenizer.feed([token]))
            if self.stopped:
                return text, used
        return text, len(tokens)

    def finish(self) -> str:
        """What is left at the end. The held text may still complete a stop string."""
        text = self._stops.feed(self._detokenizer.flush())
        return text if self.stopped else text + self._stops.flush()
