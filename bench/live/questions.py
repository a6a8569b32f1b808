"""The questions of Spec-Bench by task, rendered with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bench.live.setup import Question
from bench.plan import BenchError
from outrider.verify.tokenizer import load_tokenizer

# The tasks by Spec-Bench's category. The categories of MT-Bench are one task.
TASKS: Mapping[str, str] = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
CHAT = "chat"
NAMES = (CHAT, *TASKS.values())


def read_tasks(path: Path) -> dict[str, list[str]]:
    """The first turns of the questions, by task. Raises BenchError."""
    found: dict[str, list[str]] = {name: [] for name in NAMES}
    try:
        for line in path.read_text().splitlines():
            record = json.loads(line)
            found[TASKS.get(record["category"], CHAT)].append(str(record["turns"][0]))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchError(
            f"Cannot read questions from {path} ({error}); give Spec-Bench's question.jsonl, "
            "whose lines have `category` and `turns`."
        ) from None
    return {name: texts for name, texts in found.items() if texts}


def parse_tasks(text: str, present: Sequence[str]) -> list[str]:
    """Comma-separated names of tasks, all of them for an empty text. Raises BenchError."""
    names = text.split(",") if text else list(present)
    if unknown := [name for name in names if name not in present]:
        raise BenchError(f"There are no questions of the task {', '.join(unknown)}; choose from {', '.join(present)}.")
    return [name for name in present if name in names]


class Renderer:
    """Renders questions as the servers do: one user message, and the start of the assistant's."""

    def __init__(self, model: str, context_tokens: int, max_tokens: int, seed: int = 0) -> None:
        self._tokenizer = load_tokenizer(model)
        self._room = context_tokens - max_tokens
        self._max_tokens = max_tokens
        self._seed = seed

    def first(self, texts: Sequence[str], count: int, temperature: float) -> list[Question]:
        """The first `count` questions that leave room for an answer. Raises BenchError if there are fewer."""
        questions: list[Question] = []
        for text in texts:
            message = [{"role": "user", "content": text}]
            ids = self._tokenizer.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
            if len(ids) <= self._room:
                questions.append(Question(text, np.array(ids, np.int32), temperature, self._max_tokens, self._seed))
            if len(questions) == count:
                return questions
        raise BenchError(f"Only {len(questions)} questions of a task fit the context; lower --questions to that number.")
