"""Chat templates: which of several counts, and what is tried where one refuses a conversation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from outrider.server.chat.template import ChatTemplate, ChatTemplates
from tests.server.chat.template.restricted import FULL, TOOLS
from tests.server.fakes import TOKENIZER

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "look"}}


def templates(named: Any) -> ChatTemplates:
    tokenizer = copy.copy(TOKENIZER)
    tokenizer.chat_template = named
    return ChatTemplates(tokenizer)


@pytest.mark.parametrize(
    ("named", "plain", "with_tools"),
    [
        ("a", "a", "a"),
        ({"default": "a"}, "a", "a"),
        ({"default": "a", "tool_use": "b", "rag": "c"}, "a", "b"),
        ({"tool_use": "b"}, "b", "b"),
        ({"rag": "c", "tool_use": "b"}, "c", "b"),
        ({"default": "", "tool_use": "b"}, "b", "b"),
    ],
)
def test_which_template_counts(named: Any, plain: str, with_tools: str) -> None:
    found = templates(named)
    assert (found.choose(False).text, found.choose(True).text) == (plain, with_tools)
    assert set(found.text.split("\n")) == {plain, with_tools}


def test_fields_of_tools_that_a_template_reads_are_filled_in() -> None:
    reads = "{% for tool in tools or [] %}{{ tool.function.name ~ tool.function.parameters.required | join }}{% endfor %}"
    refuses = "{{ raise_exception('no parameters') if tools and tools[0].function.parameters is undefined }}"
    template = ChatTemplate(TOKENIZER, refuses + reads + FULL.removeprefix(TOOLS))
    assert template.abilities.tools and template.write([USER], [TOOL]).startswith("look<user>Hi")
