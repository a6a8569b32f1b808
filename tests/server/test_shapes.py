"""Answers' parts as the endpoints write them."""

import math

from transformers import AutoTokenizer

import models
from server.messages import TokenEvent, TokenLogprobs
from server.shapes import LEAST_LOGPROB, ChatShape, CompletionShape, Piece
from server.vocabulary import Vocabulary

VOCABULARY = Vocabulary(AutoTokenizer.from_pretrained(models.TARGET))


def piece() -> Piece:
    """Two events of one choice: a token with its two likeliest, then a stop token that has no log-probability."""
    known = TokenLogprobs([-0.5], [[40, 41]], [[-0.5, -math.inf]])
    made = Piece(3, offset=7)
    made.add(TokenEvent("r", 3, [40], VOCABULARY.text_of(40), logprobs=known))
    made.add(TokenEvent("r", 3, [0], "", "stop", logprobs=TokenLogprobs([], [], [])))
    return made


def test_chat_logprobs() -> None:
    choice = ChatShape(VOCABULARY).choice(piece())
    assert choice["index"] == 3
    assert choice["finish_reason"] == "stop"
    (entry,) = choice["logprobs"]["content"]
    assert entry["token"] == VOCABULARY.text_of(40)
    assert bytes(entry["bytes"]) == VOCABULARY.bytes_of(40)
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, LEAST_LOGPROB]


def test_completion_logprobs() -> None:
    found = CompletionShape(VOCABULARY).choice(piece())["logprobs"]
    assert found["tokens"] == [VOCABULARY.text_of(40)]
    assert found["token_logprobs"] == [-0.5]
    assert found["text_offset"] == [7]
    assert found["top_logprobs"] == [{VOCABULARY.text_of(40): -0.5, VOCABULARY.text_of(41): LEAST_LOGPROB}]


def test_nothing_is_written_unasked() -> None:
    assert ChatShape(VOCABULARY).delta(Piece(0, "x"))["logprobs"] is None
    assert CompletionShape(VOCABULARY).choice(Piece(0, "x"))["logprobs"] is None


def test_the_mean_counts_tokens() -> None:
    made = Piece(0, tokens=[1, 2], logprobs=TokenLogprobs([-1.0, -3.0], [[], []], [[], []]))
    assert made.mean_logprob == -2.0
