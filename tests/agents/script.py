"""The tasks, the model, and the recorded answers: a tool call, and a final text once the tool's result is in the prompt."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outrider import models

TASKS = {
    "chat": "Say that the file is written.",
    "tools": "Write the file proof.txt with your shell tool.",
    "overflow": "Count with your shell tool until the conversation is too long, and go on after it is compacted.",
}
# The tool writes this file into the agent's working folder.
PROOF = "proof.txt"
PROOF_TEXT = "the tool ran"
COMMAND = f"echo {PROOF_TEXT} > {PROOF} && cat {PROOF}"
FINAL_TEXT = "Done: the file is written."
# The answer to a request for a summary, which later prompts have in the place of what it summarises.
SUMMARY_TEXT = f"The shell tool has counted far enough. {FINAL_TEXT}"
SUMMARY_WORDS = re.compile("summar|compact|checkpoint|hand ?off", re.IGNORECASE)

# The arguments of the agents' shell tools, by the tool's name.
CALLS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "Run a command"},  # Claude Code and Continue
    "bash": lambda command: {"command": command, "description": "Run a command"},  # opencode
    "exec_command": lambda command: {"cmd": command},  # Codex
    "shell_command": lambda command: {"command": command},  # Codex for some models
    "run_commands": lambda command: {"commands": [command]},  # Cline
}

USER = "<|user|>\n"
RESULT = f"{USER}<tool_response>\n"
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|system|>\\nCall tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|user|>\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{%- set role = 'system' if message.role == 'developer' else message.role %}
{{- '<|' + role + '|>\\n' + (message.content or '') }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '\\n</tool_call>' }}
{%- endfor %}{{ '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""


# The number of a call of the task "overflow".
COUNTED = re.compile(r"seq (\d+)0000 ")


def long_model(folder: Path, context_tokens: int = 16_384) -> Path:
    """A copy of the embedded model in `folder` with a longer context and the agents' chat template."""
    copied = shutil.copytree(models.TARGET, folder / "long")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context_tokens}))
    (copied / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return copied


def recorded_answer(prompt: str) -> str:
    """The answer to a rendered prompt.

    Requests that need no tool, and those without a shell tool, such as requests for a title, get the final text.
    """
    tool = next((name for name in CALLS if f'"name": "{name}"' in prompt), None)
    if TASKS["overflow"] in prompt or SUMMARY_TEXT in prompt:
        return overflowing_answer(prompt, tool)
    if tool is None or RESULT in prompt or TASKS["chat"] in prompt:
        return FINAL_TEXT
    return f"I write the file.\n{call(tool, COMMAND)}"


def overflowing_answer(prompt: str, tool: str | None) -> str:
    """A call whose result is long, until the conversation is compacted: summarised, or without its earlier results."""
    results = prompt.count(RESULT)
    if SUMMARY_TEXT in prompt or any(int(number) > results for number in COUNTED.findall(prompt)):
        return FINAL_TEXT
    asked = prompt.rpartition(USER)[2]
    if SUMMARY_WORDS.search(asked) and not asked.startswith("<tool_response>") and TASKS["overflow"] not in asked:
        return SUMMARY_TEXT
    if tool is None:
        return FINAL_TEXT
    number = results + 1  # agents stop at calls that they have made before
    return f"I count.\n{call(tool, f'seq {number}0000 {number}2500')}"


def call(tool: str, command: str) -> str:
    """A call of a shell tool as the chat template writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': CALLS[tool](command)})}\n</tool_call>"
