"""Log-probabilities of tokens, in the formats of OpenAI's endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def completion_logprobs(vocabulary: Vocabulary, output: ChoiceOutput) -> dict[str, Any]:
    """One list per property, as in completions."""
    tokens: list[str] = []
    offsets: list[int] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offset = output.offset
    for number, (token, logprob, top) in enumerate(_each_token(output)):
        tokens.append(vocabulary.text_of(token))
        # The first token of an echoed prompt has no context, so it has no log-probability.
        has_context = number > 0 or not output.echoed_tokens
        logprobs.append(logprob if has_context else None)
        # As with OpenAI, the chosen token is always included.
        most_likely = {vocabulary.text_of(other): value for other, value in [*top, (token, logprob)]}
        tops.append(most_likely if has_context else None)
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _each_token(output: ChoiceOutput) -> Iterator[tuple[int, float, list[tuple[int, float]]]]:
    """Each token that has a log-probability: the token, its log-probability, and the most likely tokens with theirs."""
    found = output.logprobs or TokenLogprobs([], [], [])
    for token, logprob, ids, values in zip(output.tokens, found.chosen, found.ids, found.values, strict=False):
        top = [(other, max(value, MIN_LOGPROB)) for other, value in zip(ids, values, strict=True)]
        yield token, max(logprob, MIN_LOGPROB), top
