"""How each endpoint writes the parts of an answer. Knows nothing of where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from server.messages import TokenEvent, TokenLogprobs
from server.vocabulary import Vocabulary

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


@dataclass
class Piece:
    """A part of one choice, or all of it."""

    index: int
    text: str = ""
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None  # of the tokens; a stop token at the end may have none
    offset: int = 0  # characters of the choice before it

    def add(self, event: TokenEvent) -> None:
        """Takes an event of the same choice in."""
        self.text += event.text
        self.finish = event.finish
        self.tokens += event.tokens
        if event.logprobs is not None:
            known = self.logprobs or TokenLogprobs([], [], [])
            more = event.logprobs
            self.logprobs = TokenLogprobs(known.chosen + more.chosen, known.ids + more.ids, known.values + more.values)

    @property
    def mean_logprob(self) -> float:
        """Per token; what `best_of` goes by."""
        chosen = self.logprobs.chosen if self.logprobs else []
        return sum(chosen) / max(1, len(chosen))


class Shape(Protocol):
    """How one endpoint writes its answers."""

    object: str
    chunk_object: str
    prefix: str  # of the answer's id

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice, before any text."""

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A later chunk's choice."""

    def choice(self, piece: Piece) -> dict[str, Any]:
        """A choice of the whole answer."""


class ChatShape:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}

    def choice(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None, "annotations": []}
        return {"index": piece.index, "message": message, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*each) for each in likeliest]}
            for token, logprob, likeliest in each_token(piece)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._vocabulary.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


class CompletionShape:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl-"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def delta(self, piece: Piece) -> dict[str, Any]:
        return self.choice(piece)

    def choice(self, piece: Piece) -> dict[str, Any]:
        return {"index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        text = self._vocabulary.text_of
        tokens, logprobs, tops, offsets = [], [], [], []
        offset = piece.offset
        for token, logprob, likeliest in each_token(piece):
            tokens.append(text(token))
            logprobs.append(logprob)
            # The chosen token is among them, as OpenAI has it.
            tops.append({text(other): value for other, value in [*likeliest, (token, logprob)]})
            offsets.append(offset)
            offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def each_token(piece: Piece) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """The tokens that have log-probabilities: each with its own and the likeliest ones there."""
    found = piece.logprobs or TokenLogprobs([], [], [])
    for token, logprob, ids, values in zip(piece.tokens, found.chosen, found.ids, found.values, strict=False):
        likeliest = [(id, max(value, LEAST_LOGPROB)) for id, value in zip(ids, values, strict=True)]
        yield token, max(logprob, LEAST_LOGPROB), likeliest
