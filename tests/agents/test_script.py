"""The recorded answer depends on the tools and results in the rendered prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider import models
from outrider.verify.tokenizer import load_tokenizer
from tests.agents.__main__ import CONTEXT_TOKENS, compacted
from tests.agents.script import CALLS, CHAT_TEMPLATE, COMMAND, FINAL_TEXT, SUMMARY_TEXT, TASKS, recorded_answer

TASK = {"role": "user", "content": "Write the file."}


def render(messages: list[dict[str, Any]], *tools: str) -> str:
    functions = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
    tokenizer = load_tokenizer(str(models.TARGET))
    text = tokenizer.apply_chat_template(
        messages, tools=functions or None, chat_template=CHAT_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    return str(text)


@pytest.mark.parametrize("tool", CALLS)
def test_a_shell_tool_is_called_once(tool: str) -> None:
    prompt = render([TASK], "read", tool)
    call = json.loads(recorded_answer(prompt).split("<tool_call>")[1].removesuffix("</tool_call>"))
    assert call == {"name": tool, "arguments": CALLS[tool](COMMAND)}
    function = {"id": "1", "type": "function", "function": call}
    asked = {"role": "assistant", "content": None, "tool_calls": [function]}
    assert recorded_answer(render([TASK, asked, {"role": "tool", "content": "written"}], "read", tool)) == FINAL_TEXT


def test_a_request_without_a_shell_tool_gets_the_final_text() -> None:
    assert recorded_answer(render([{"role": "developer", "content": "A title."}, TASK])) == FINAL_TEXT
    assert recorded_answer(render([TASK], "read")) == FINAL_TEXT


def test_a_task_without_a_tool_gets_the_final_text() -> None:
    assert recorded_answer(render([{"role": "user", "content": TASKS["chat"]}], "bash")) == FINAL_TEXT
    assert "<tool_call>" in recorded_answer(render([{"role": "user", "content": TASKS["tools"]}], "bash"))


def test_a_task_goes_on_until_the_conversation_is_summarised() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": TASKS["overflow"]}]
    commands = set()
    for _ in range(3):
        call = json.loads(recorded_answer(render(turns, "bash")).split("<tool_call>")[1].removesuffix("</tool_call>"))
        commands.add(call["arguments"]["command"])
        function = {"id": "1", "type": "function", "function": call}
        turns += [{"role": "assistant", "content": None, "tool_calls": [function]}, {"role": "tool", "content": "10000\n10001"}]
    assert len(commands) == 3
    assert recorded_answer(render([*turns, {"role": "user", "content": "Summarise this conversation."}])) == SUMMARY_TEXT
    summarised = [{"role": "user", "content": SUMMARY_TEXT}, {"role": "user", "content": "Go on."}]
    assert recorded_answer(render(summarised, "bash")) == FINAL_TEXT


def test_a_compacted_conversation_has_a_shorter_prompt_at_last() -> None:
    def requests(*tokens: int | None) -> list[dict[str, Any]]:
        return [{"status": 400} if each is None else {"status": 200, "prompt_tokens": each} for each in tokens]

    assert compacted(requests(10, 20, 5)) and compacted(requests(10, None, 20, 15))
    assert not compacted(requests(10, 20, 30)) and not compacted(requests(10, None))
    assert not compacted([*requests(10, 20, 5), {"status": 500, "prompt_tokens": CONTEXT_TOKENS}])
