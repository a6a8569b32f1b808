"""`outrider` whose worker replays recorded answers: a tool call, and a final text once the tool's result is in the prompt.

The worker's forwards are real; their tokens are those of the recorded answer.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from outrider import models
from outrider.drafters.interface import Ints
from outrider.server import cli
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import Settings
from outrider.verify.sampling.acceptance import walk
from outrider.verify.verifier import Judgement, Verifier

PROGRAM = "tests.integration.api.replaying"
CALL_TEXT, FINAL_TEXT = "I write the file.", "Done: the file is written."
THOUGHT = "A file is asked for."
ARGUMENTS = {"command": "echo the tool ran > proof.txt", "description": "Run a command"}
CONTEXT_TOKENS = 16_384

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
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' + ('<think>\\n' if enable_thinking else '') }}{% endif %}"""


def long_model(folder: Path) -> Path:
    """A copy of the embedded model in `folder` with a longer context and a chat template for tools."""
    copied = shutil.copytree(models.TARGET, folder / "long")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_TOKENS}))
    (copied / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return copied


def recorded_answer(prompt: str) -> str:
    """The answer to a rendered prompt: a call of the tool `bash` if it has that tool and no result. It thinks if asked to."""
    if prompt.endswith("<think>\n"):
        return f"{THOUGHT}\n</think>\n\n{FINAL_TEXT}"
    if '"name": "bash"' not in prompt or RESULT in prompt:
        return FINAL_TEXT
    return f"{CALL_TEXT}\n<tool_call>\n{json.dumps({'name': 'bash', 'arguments': ARGUMENTS})}\n</tool_call>"


def recorded(judgement: Judgement, answer: list[int], first: int) -> Judgement:
    """Chooses the tokens of a recorded answer, whatever the logits are. `first` is the position of the next one."""
    tree = judgement.tree

    def chosen(row: int) -> int:
        place = first + [0, *tree.depths.tolist()][row]
        return answer[place] if place < len(answer) else 0

    return replace(judgement, decision=lambda: (*walk(tree, chosen), judgement.decision()[2]))


def main(argument: str) -> None:
    """Runs the server's worker; every request is answered with `recorded_answer` once the model is loaded."""
    from outrider.server.worker import main as worker
    from outrider.server.worker import runtime

    load, begin, judge = runtime.load, Verifier.begin, Verifier.judge
    answers: WeakKeyDictionary[Verifier, list[int]] = WeakKeyDictionary()

    def load_and_replay(settings: Settings) -> runtime.Runtime:
        loaded = load(settings)

        def begin_recorded(verifier: Verifier, prompt: Ints, *arguments: Any, **options: Any) -> int:
            reused = begin(verifier, prompt, *arguments, **options)
            answer = recorded_answer(str(loaded.tokenizer.decode(prompt)))
            answers[verifier] = loaded.tokenizer.encode(answer, add_special_tokens=False)
            return reused

        def judge_recorded(verifier: Verifier, *arguments: Any) -> Judgement:
            return recorded(judge(verifier, *arguments), answers[verifier], verifier.sequence.emitted)

        Verifier.begin = begin_recorded  # type: ignore[method-assign, assignment]
        Verifier.judge = judge_recorded  # type: ignore[method-assign, assignment]
        return loaded

    runtime.load = load_and_replay
    worker.main(argument)


if __name__ == "__main__":
    WorkerProcess.module = PROGRAM
    cli.main()
