"""Reasoning and content at every cut, in every format; and the format that a template tells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.chat.reasoning_parser import REASONING_FORMATS, ReasoningFormat, ReasoningParser, detect_reasoning
from outrider.server.chat.tools import Part, merge_parts
from outrider.server.chat.tools.source import overlap

TEMPLATES = {
    "harmony": "<|channel|>analysis<|message|>",
    "gemma": "<|turn>model {{- '<|channel>thought\\n<channel|>' -}}",
    "seed": "{%- set think_begin_token = '<seed:think>' -%}",
    "mistral": "[THINK]{{ block['thinking'] }}[/THINK]",
    "granite": "thoughts between <think></think> and write your response between <response></response>",
    "think": "{{ '<think>' + reasoning_content }}",
}
BY_NAME = {format.name: format for format in REASONING_FORMATS}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_format_is_detected_from_the_template(name: str) -> None:
    assert detect_reasoning(TEMPLATES[name]) == BY_NAME[name]
    assert detect_reasoning("{{ message.content }}") is None


@pytest.mark.parametrize("format", [format for format in REASONING_FORMATS if not format.channels], ids=lambda each: each.name)
@pytest.mark.parametrize("opened", [False, True])
def test_every_format_at_every_cut(format: ReasoningFormat, opened: bool) -> None:
    answer = "Yes.".join(format.wrapper or ("", ""))
    text = f"{'' if opened else format.opening}\nHm, < so. {format.closing}\n\n{answer}"
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
        parser = ReasoningParser(None, True, opened, format)
        parts = merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert parts == [Part("reasoning", "Hm, < so."), Part("content", "Yes.")]


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_the_longest_overlap_is_found(text: str, marker: str) -> None:
    sizes = [size for size in range(len(marker)) if text.endswith(marker[:size])]
    assert overlap(text, marker) == max(sizes)
