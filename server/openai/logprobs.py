"""Log-probabilities of tokens, in the formats of OpenAI's endpoints."""

import codecs
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import TokenLogprobs
from outrider.server.openai.generation import ChoiceOutput

# OpenAI's replacement for minus infinity, which JSON does not have.
MIN_LOGPROB = -9999.0


def content_logprobs(vocabulary: Vocabulary, output: ChoiceOutput) -> list[dict[str, Any]]:
    """One entry per token, as in chats and responses."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return [
        entry(token, logprob) | {"top_logprobs": [entry(*each) for each in top]} for token, logprob, top in _each_token(output)
    ]


class TextCursor:
    """The place of each token in a text."""

    def __init__(self, start: int = 0) -> None:
        self.characters = start  # complete ones before the next token
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_inside(self) -> bool:
        """Whether the last token has ended inside a character."""
        return bool(self._decoder.getstate()[0])

    def feed(self, data: bytes) -> int:
        """The number of characters before the one in which a token of these bytes begins."""
        start = self.characters
        if data:
            self.characters += len(self._decoder.decode(data[:1]))
            start = self.characters if self.is_inside else self.characters - 1
            self.characters += len(self._decoder.decode(data[1:]))
        return start


class ScoredToken(NamedTuple):
    """An entry of each of the lists of a completion."""

    start: int  # characters of the text before the token
    token: str
    logprob: float | None  # None without context
    top: dict[str, float] | None


class CompletionLogprobs:
    """The log-probabilities of one choice of a completion, as one list per property.

    A token is returned when the text in which it begins is, so that `text_offset` is right although a stop string may still
    cut the text. A token that begins inside a character has the offset of that character.
    """

    def __init__(self, vocabulary: Vocabulary, hidden: Collection[int] = (), drops_first_space: bool = False) -> None:
        """`hidden` and `drops_first_space`: see `Detokenizer`."""
        self._vocabulary = vocabulary
        self._hidden = hidden
        self._at_space = drops_first_space
        self._cursor = TextCursor()
        self._characters = 0  # of the text so far
        self._waiting: list[ScoredToken] = []

    def take(self, output: ChoiceOutput) -> dict[str, Any] | None:
        """The entries that are due with an output; None if it has neither entries nor text."""
        self._characters += len(output.text)
        starts = self._starts(output)
        for number, (token, logprob, top) in enumerate(_each_token(output)):
            text, tops = named(self._vocabulary, token, logprob, top)
            # The first token of an echoed prompt has no context, so it has no log-probability.
            has_context = number > 0 or not output.echoed_tokens
            entry = ScoredToken(next(starts), text, logprob if has_context else None, tops if has_context else None)
            self._waiting.append(entry)
        is_last = output.finish is not None
        due = [entry for entry in self._waiting if is_last or entry.start <= self._characters]
        self._waiting = self._waiting[len(due) :]
        if not due and not output.text:
            return None
        return {
            "tokens": [entry.token for entry in due],
            "token_logprobs": [entry.logprob for entry in due],
            "top_logprobs": [entry.top for entry in due],
            "text_offset": [min(entry.start, self._characters) for entry in due],
        }

    def _starts(self, output: ChoiceOutput) -> Iterator[int]:
        """The character at which each token begins."""
        if output.echoed_tokens:
            echo, _ = output.pieces[0]
            for token in output.tokens[: output.echoed_tokens]:
                yield min(len(echo), self._cursor.feed(self._echoed(token, echo)))
            self._cursor = TextCursor(len(echo))
        for token in output.tokens[output.echoed_tokens :]:
            data = b"" if token in self._hidden else self._vocabulary.bytes_of(token)
            if data and self._at_space:
                data, self._at_space = data.removeprefix(b" "), False
            yield self._cursor.feed(data)

    def _echoed(self, token: int, echo: str) -> bytes:
        """The bytes of a prompt's token in the prompt's text, which may lack special tokens and the space before a word."""
        data, start = self._vocabulary.bytes_of(token), self._cursor.characters
        if self._cursor.is_inside:
            return data
        if token in self._vocabulary.special_ids:
            return data if echo.startswith(data.decode(), start) else b""
        return data if echo.startswith(" ", start) else data.removeprefix(b" ")


def named(
    vocabulary: Vocabulary, chosen: int, logprob: float, top: Iterable[tuple[int, float]]
) -> tuple[str, dict[str, float]]:
    """A token's text, and the most likely tokens by theirs. As with OpenAI, the chosen token is always included."""
    names = {chosen: written(vocabulary.bytes_of(chosen))}
    taken = {names[chosen]}
    for token, _ in top:
        if token not in names:
            text = written(vocabulary.bytes_of(token))
            names[token] = f"token_id:{token}" if text in taken else text
            taken.add(names[token])
    return names[chosen], {names[token]: value for token, value in [*top, (chosen, logprob)]}


def written(data: bytes) -> str:
    """The text of a token's bytes; OpenAI's form for bytes if a character is incomplete, as in `bytes:\\xf0\\x9f`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")


def _each_token(output: ChoiceOutput) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token that has a log-probability: the token, its log-probability, and the most likely tokens with theirs."""
    found = output.logprobs or TokenLogprobs([], [], [])
    for token, logprob, ids, values in zip(output.tokens, found.chosen, found.ids, found.values, strict=False):
        top = [(other, max(value, MIN_LOGPROB)) for other, value in zip(ids, values, strict=True)]
        yield token, max(logprob, MIN_LOGPROB), top
