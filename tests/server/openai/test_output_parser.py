"""Choices are parsed independently and end before a second call if only one is allowed; reasoning tokens are counted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.sequence import Finish
from outrider.server.chat.reasoning_parser import ReasoningParser
from outrider.server.chat.tools import Part, merge_parts, tool_parser
from outrider.server.engine.messages import TokenEvent
from outrider.server.openai.generation import ChoiceOutput
from outrider.server.openai.output_parser import HiddenMarkers, OutputParser, SingleCallParser, SingleCallStop

# Text, a call, more text, a second call and the end of the text.
CALLS = "".join(
    f'{text}\n<tool_call>\n{{"name": "f", "arguments": {{"a": {number}}}}}\n</tool_call>\n'
    for number, text in enumerate(("So:", "And:"))
)


def output(text: str, finish: Finish | None = None, index: int = 0, tokens: int = 1, **fields: Any) -> ChoiceOutput:
    """The output of one event; `fields` are the event's."""
    made = ChoiceOutput(index)
    made.add(TokenEvent("r", [40] * tokens, text, finish, **fields))
    return made


def test_choices_do_not_mix() -> None:
    parser = OutputParser(lambda: ReasoningParser(may_reason=True))
    assert parser.parse(output("<think>a", tokens=3)) == [Part("reasoning", "a")]
    assert parser.parse(output("b", index=1)) == [Part("content", "b")]
    assert parser.parse(output("c", tokens=2)) == [Part("reasoning", "c")]
    assert parser.parse(output("</think>d")) == [Part("content", "d")]
    assert parser.reasoning_tokens == 5


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 1000])
def test_an_answer_with_one_call_ends_before_the_second(size: int) -> None:
    parser, stop = (
        SingleCallParser(ReasoningParser(tool_parser("hermes"))),
        SingleCallStop(ReasoningParser(tool_parser("hermes"))),
    )
    parts: list[Part] = []
    read = 0
    for start in range(0, len(CALLS), size):
        piece = CALLS[start : start + size]
        parts += parser.feed(piece)
        read += len(piece)
        cut = stop.feed(piece)
        if cut is not None:
            break
    assert cut is not None and (cut.characters, cut.finish) == (len(piece), "stop")
    assert CALLS[:read].count('"name": "f"') == 2
    assert parser.feed(CALLS) == [] and parser.finish() == []
    expected = [Part("content", "So:"), Part("call", "f"), Part("arguments", '{"a": 0}'), Part("content", "And:")]
    assert merge_parts(parts) == expected


@given(st.lists(st.sampled_from(["<mark>", "<|mark|>", "a", " ", "<ma", "b>", "<tool_call>"]), max_size=8))
def test_markers_are_not_text(pieces: list[str]) -> None:
    markers = ("<mark>", "<|mark|>", "<tool_call>")
    parser = HiddenMarkers(tool_parser("hermes", {}), markers)
    parts = merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
    assert "".join(part.text for part in parts) == "".join(piece for piece in pieces if piece not in markers)
