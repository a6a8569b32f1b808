"""The tasks, the model, and the recorded answers: a tool call, and a final text once the tool's result is in the prompt."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from outrider import models

TASKS = {"chat": "Say that the file is written.", "tools": "Write the file proof.txt with your shell tool."}
# The tool writes this file into the agent's working folder.
PROOF = "proof.txt"
PROOF_TEXT = "the tool ran"
COMMAND = f"echo {PROOF_TEXT} > {PROOF} && cat {PROOF}"
FINAL_TEXT = "Done: the file is written."

# The arguments of the agents' shell tools, by the tool's name.
CALLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": COMMAND, "description": "Write a file"},  # Claude Code and Continue
    "bash": {"command": COMMAND, "description": "Write a file"},  # opencode
    "exec_command": {"cmd": COMMAND},  # Codex
    "shell_command": {"command": COMMAND},  # Codex for some models
    "run_commands": {"commands": [COMMAND]},  # Cline
}

RESULT = "<|user|>\n<tool_response>\n"
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
    if tool is None or RESULT in prompt or TASKS["chat"] in prompt:
        return FINAL_TEXT
    call = json.dumps({"name": tool, "arguments": CALLS[tool]})
    return f"I write the file.\n<tool_call>\n{call}\n</tool_call>"
