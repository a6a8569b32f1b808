"""How each endpoint writes the parts of an answer. Knows nothing of where they come from."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from server.chat.reasoning_parser import ReasoningParser
from server.chat.tool_parsers import Part, merged
from server.chat.vocabulary import Vocabulary
from server.engine.messages import TokenEvent, TokenLogprobs

LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI writes this


@dataclass
class ChoiceOutput:
    """A part of one choice, or all of it, the echoed prompt included."""

    index: int
    text: str = ""
    finish: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: TokenLogprobs | None = None  # of the tokens; a stop token at the end may have none
    offset: int = 0  # characters of the choice before it
    shows_tokens: bool = False  # the choice has the tokens' ids
    pieces: list[tuple[str, int]] = field(default_factory=list)  # the texts as they came, and how many tokens with each
    echoed: int = 0  # tokens of the prompt; they come first

    def add(self, event: TokenEvent) -> None:
        """Takes an event of the same choice in."""
        self.text += event.text
        self.pieces.append((event.text, len(event.tokens)))
        self.finish = event.finish
        self.tokens += event.tokens
        if event.logprobs is not None:
            known = self.logprobs or TokenLogprobs([], [], [])
            more = event.logprobs
            self.logprobs = TokenLogprobs(known.chosen + more.chosen, known.ids + more.ids, known.values + more.values)

    @property
    def extra(self) -> dict[str, Any]:
        """The fields of a choice that are there only where they are asked for."""
        return {"token_ids": self.tokens[self.echoed :]} if self.shows_tokens else {}

    @property
    def mean_logprob(self) -> float:
        """Per token; what `best_of` goes by."""
        chosen = self.logprobs.chosen[self.echoed :] if self.logprobs else []
        return sum(chosen) / max(1, len(chosen))


class Formatter(Protocol):
    """How one endpoint writes its answers."""

    object: str
    chunk_object: str
    prefix: str  # of the answer's id
    reasoning_tokens: int  # that have been written so far

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk's choice, before any text."""

    def deltas(self, piece: ChoiceOutput) -> list[dict[str, Any]]:
        """Later chunks' choices, the last one with the reason for the end where that has come."""

    def choice(self, piece: ChoiceOutput) -> dict[str, Any]:
        """A choice of the whole answer."""


class ChatFormatter:
    """/v1/chat/completions."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def __init__(
        self, vocabulary: Vocabulary, reader: Callable[[], ReasoningParser] = ReasoningParser, named: bool = False
    ) -> None:
        """`reader` makes one for each choice; with `named`, the client has named the tool to be called."""
        self._vocabulary = vocabulary
        self._reader = reader
        self._named = named
        self._readers: dict[int, ReasoningParser] = {}  # of the choices that are streamed
        self._called: set[int] = set()  # choices with calls
        self.reasoning_tokens = 0

    def opening(self, index: int) -> dict[str, Any] | None:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def deltas(self, piece: ChoiceOutput) -> list[dict[str, Any]]:
        reader = self._readers.setdefault(piece.index, self._reader())
        parts = merged(self._read(reader, piece))
        if any(part.kind == "call" for part in parts):
            self._called.add(piece.index)
        deltas = [delta(part) for part in parts] or ([{}] if piece.logprobs or piece.shows_tokens else [])
        choices: list[dict[str, Any]] = [
            {"index": piece.index, "delta": each, "logprobs": None, "finish_reason": None} for each in deltas
        ]
        if choices:
            choices[0] |= {"logprobs": self._logprobs(piece), **piece.extra}
        if piece.finish is not None:
            reason = self._reason(piece.finish, piece.index in self._called)
            choices.append({"index": piece.index, "delta": {}, "logprobs": None, "finish_reason": reason})
        return choices

    def choice(self, piece: ChoiceOutput) -> dict[str, Any]:
        parts = merged(self._read(self._reader(), piece))
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None, "annotations": []}
        calls: list[dict[str, Any]] = []
        for part in parts:
            match part.kind:
                case "content":
                    message["content"] = (message["content"] or "") + part.text
                case "reasoning":
                    message["reasoning_content"] = message.get("reasoning_content", "") + part.text
                case "call":
                    calls.append({"id": new_call(), "type": "function", "function": {"name": part.text, "arguments": ""}})
                case "arguments":
                    calls[part.call]["function"]["arguments"] += part.text
        if calls:
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        reason = self._reason(piece.finish, bool(calls))
        choice = {"index": piece.index, "message": message, "logprobs": self._logprobs(piece), "finish_reason": reason}
        return choice | piece.extra

    def _read(self, reader: ReasoningParser, piece: ChoiceOutput) -> list[Part]:
        parts: list[Part] = []
        for text, tokens in piece.pieces or [(piece.text, 0)]:
            found = reader.feed(text)
            if found and all(part.kind == "reasoning" for part in found):
                self.reasoning_tokens += tokens
            parts += found
        return parts + (reader.finish() if piece.finish is not None else [])

    def _reason(self, finish: str | None, called: bool) -> str | None:
        """A call is a reason to end; not where the client has named the tool, as OpenAI has it."""
        return "tool_calls" if finish == "stop" and called and not self._named else finish

    def _logprobs(self, piece: ChoiceOutput) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        return {"content": logprob_entries(self._vocabulary, piece), "refusal": None}


class CompletionFormatter:
    """/v1/completions."""

    object = "text_completion"
    chunk_object = "text_completion"
    prefix = "cmpl-"
    reasoning_tokens = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def deltas(self, piece: ChoiceOutput) -> list[dict[str, Any]]:
        choices = []
        if piece.text or piece.logprobs or piece.shows_tokens:
            choices.append(self.choice(replace(piece, finish=None)))
        if piece.finish is not None:
            choices.append(self.choice(ChoiceOutput(piece.index, finish=piece.finish)))
        return choices

    def choice(self, piece: ChoiceOutput) -> dict[str, Any]:
        choice = {"index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece), "finish_reason": piece.finish}
        return choice | piece.extra

    def _logprobs(self, piece: ChoiceOutput) -> dict[str, Any] | None:
        if piece.logprobs is None:
            return None
        text = self._vocabulary.text_of
        tokens: list[str] = []
        offsets: list[int] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offset = piece.offset
        for number, (token, logprob, likeliest) in enumerate(each_token(piece)):
            tokens.append(text(token))
            known = number > 0 or not piece.echoed  # nothing stands before a prompt's first token
            logprobs.append(logprob if known else None)
            # The chosen token is among them, as OpenAI has it.
            tops.append({text(other): value for other, value in [*likeliest, (token, logprob)]} if known else None)
            offsets.append(offset)
            offset += len(tokens[-1])
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def logprob_entries(vocabulary: Vocabulary, piece: ChoiceOutput) -> list[dict[str, Any]]:
    """The log-probabilities of a piece's tokens as chats and responses have them."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = vocabulary.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    return [
        entry(token, logprob) | {"top_logprobs": [entry(*each) for each in likeliest]}
        for token, logprob, likeliest in each_token(piece)
    ]


def delta(part: Part) -> dict[str, Any]:
    """A part of a chat answer as a chunk has it."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text}
        case "call":
            function = {"name": part.text, "arguments": ""}
            return {"tool_calls": [{"index": part.call, "id": new_call(), "type": "function", "function": function}]}
        case "arguments":
            return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}


def new_call() -> str:
    """An id for a tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def each_token(piece: ChoiceOutput) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """The tokens that have log-probabilities: each with its own and the likeliest ones there."""
    found = piece.logprobs or TokenLogprobs([], [], [])
    for token, logprob, ids, values in zip(piece.tokens, found.chosen, found.ids, found.values, strict=False):
        likeliest = [(id, max(value, LEAST_LOGPROB)) for id, value in zip(ids, values, strict=True)]
        yield token, max(logprob, LEAST_LOGPROB), likeliest
