"""Answers' parts as the endpoints write them."""

import math
from typing import Any

from transformers import AutoTokenizer

import models
from server.chat.reasoning_parser import ReasoningParser
from server.chat.tool_parsers import reader_of
from server.chat.vocabulary import Vocabulary
from server.engine.messages import TokenEvent, TokenLogprobs
from server.openai.formatters import LEAST_LOGPROB, ChatFormatter, ChoiceOutput, CompletionFormatter

VOCABULARY = Vocabulary(AutoTokenizer.from_pretrained(models.TARGET))


def piece() -> ChoiceOutput:
    """Two events of one choice: a token with its two likeliest, then a stop token that has no log-probability."""
    known = TokenLogprobs([-0.5], [[40, 41]], [[-0.5, -math.inf]])
    made = ChoiceOutput(3, offset=7)
    made.add(TokenEvent("r", 3, [40], VOCABULARY.text_of(40), logprobs=known))
    made.add(TokenEvent("r", 3, [0], "", "stop", logprobs=TokenLogprobs([], [], [])))
    return made


def test_chat_logprobs() -> None:
    choice = ChatFormatter(VOCABULARY).choice(piece())
    assert choice["index"] == 3
    assert choice["finish_reason"] == "stop"
    (entry,) = choice["logprobs"]["content"]
    assert entry["token"] == VOCABULARY.text_of(40)
    assert bytes(entry["bytes"]) == VOCABULARY.bytes_of(40)
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, LEAST_LOGPROB]


def test_completion_logprobs() -> None:
    found = CompletionFormatter(VOCABULARY).choice(piece())["logprobs"]
    assert found["tokens"] == [VOCABULARY.text_of(40)]
    assert found["token_logprobs"] == [-0.5]
    assert found["text_offset"] == [7]
    assert found["top_logprobs"] == [{VOCABULARY.text_of(40): -0.5, VOCABULARY.text_of(41): LEAST_LOGPROB}]


def test_nothing_is_written_unasked() -> None:
    (delta,) = ChatFormatter(VOCABULARY).deltas(ChoiceOutput(0, "x"))
    assert delta["logprobs"] is None
    assert "token_ids" not in delta
    assert CompletionFormatter(VOCABULARY).choice(ChoiceOutput(0, "x"))["logprobs"] is None


def test_the_mean_counts_tokens() -> None:
    made = ChoiceOutput(0, tokens=[1, 2], logprobs=TokenLogprobs([-1.0, -3.0], [[], []], [[], []]))
    assert made.mean_logprob == -2.0


CALL = '<think>why</think>So:\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def shape(named: bool = False) -> ChatFormatter:
    return ChatFormatter(VOCABULARY, lambda: ReasoningParser(reader_of("hermes"), reasons=True), named)


def test_a_whole_chat_answer_has_its_parts() -> None:
    choice = shape().choice(ChoiceOutput(0, CALL, "stop"))
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("So:", "why")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert call["id"].startswith("call_")
    assert choice["finish_reason"] == "tool_calls"
    assert shape(named=True).choice(ChoiceOutput(0, CALL, "stop"))["finish_reason"] == "stop"
    assert shape().choice(ChoiceOutput(0, CALL[:-20], "length"))["finish_reason"] == "length"


def test_chunks_add_up_to_the_whole() -> None:
    streamed = shape()
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "name": "", "arguments": ""}
    for character in CALL:
        for choice in streamed.deltas(ChoiceOutput(0, pieces=[(character, 1)])):
            for name, value in choice["delta"].items():
                if name == "tool_calls":
                    assert value[0]["index"] == 0
                    for part, text in value[0]["function"].items():
                        message[part] += text
                else:
                    message[name] += value
    last = streamed.deltas(ChoiceOutput(0, finish="stop"))[-1]
    assert last["finish_reason"] == "tool_calls"
    assert message == {"content": "So:", "reasoning_content": "why", "name": "f", "arguments": '{"a": 1}'}
    assert streamed.reasoning_tokens == 3
