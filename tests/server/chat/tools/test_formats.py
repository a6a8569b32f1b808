"""The format is chosen by the chat template's text, and ids of calls have the form that the template takes."""

import copy
import re
from typing import Any

import pytest

from outrider.server.chat.tools import FORMATS, detect_format
from outrider.server.chat.tools.call_ids import with_model_ids
from tests.docs.markdown import ROOT
from tests.server.chat.tools.samples import SAMPLES, Sample


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.format for sample in SAMPLES])
def test_the_format_is_detected_from_the_template(sample: Sample) -> None:
    assert detect_format(f"{{% if tools %}} {sample.template}") == FORMATS[sample.format]


def test_the_documentation_has_every_format() -> None:
    items = re.findall(r"^- `(\w+)` \((.*?)\):\s", (ROOT / "docs" / "tools.md").read_text(), flags=re.M)
    assert dict(items) == {format.name: format.models for format in FORMATS.values()}


def call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_1", "f"), call("abcDEF123", "g")]},
    {"role": "tool", "content": "1", "tool_call_id": "abcDEF123"},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_1", "g")]},  # some clients count anew in every turn
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": "4", "tool_call_id": "unknown"},
]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [
        id
        for message in messages
        for id in (*(each["id"] for each in message.get("tool_calls", ())), *filter(None, [message.get("tool_call_id")]))
    ]


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("hermes", ["call_1", "abcDEF123", "abcDEF123", "call_1", "call_1", "call_1", "unknown"]),
        ("mistral", ["74196fe72", "abcDEF123", "abcDEF123", "74196fe72", "74196fe72", "74196fe72", "unknown"]),
        (
            "kimi_k2",
            ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.g:2", "functions.g:2", "unknown"],
        ),
    ],
)
def test_ids(format: str, expected: list[str]) -> None:
    before = copy.deepcopy(CONVERSATION)
    form = FORMATS[format].call_id
    assert ids(with_model_ids(CONVERSATION, form)) == expected
    assert before == CONVERSATION
    for size in range(len(CONVERSATION)):
        assert with_model_ids(CONVERSATION[:size], form) == with_model_ids(CONVERSATION, form)[:size]
