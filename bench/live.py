"""`outrider bench live`: the drafters of a served model on the six tasks of Spec-Bench.

The drafters answer each question in turns, because the machine's speed changes over time. Every question is a session of its
own, from which no other one learns.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.http.chat import Answer
from bench.http.process import start_server
from bench.pair.prompts import Question, user
from bench.pair.run import Server, in_turns
from bench.plan import BenchError
from outrider.server.settings import parse_flags
from outrider.server.settings.sources import load_served

# The tasks by Spec-Bench's category. The categories of MT-Bench are one task.
TASKS: Mapping[str, str] = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
CHAT = "chat"
ALL = "all"  # the summary of every task
PLAIN = "none"
SEED = 0
# Sampling as requests say, and nothing known of earlier questions.
SERVER_FLAGS = ("--model.generation_config", "none", "--sessions.automatic", "off")
COLUMNS = {
    "drafter": "drafter",
    "tokens/s": "tokens_per_second:.1f",
    "ms/token,\nno prompt": "ms_per_token_after_prompt:.1f",
    "tokens\n/step": "tokens_per_step:.2f",
    "first\nms": "first_token_ms:.0f",
    "over\nnone": "over_none:.2f",
    "equal": "same_as_none",
}
LEGEND = (
    "tokens/s: of whole requests, prompts included; ms/token: from the first token on. over none: median over the questions of "
    "the ratio of tokens/s to plain decoding's. equal: answers that are those of plain decoding."
)

Row = dict[str, Any]
Answers = dict[str, list[Answer]]  # by drafter, in the order of the questions


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    prompts: Path
    questions: int  # per task
    drafters: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    only: str = ""  # comma-separated names of tasks; empty measures all


def run(config: Path | None, flags: Sequence[str], choice: Choice, out: Path | None) -> dict[str, Any]:
    """Measures task by task, saves after each one if `out` is given, and prints. Raises BenchError and SettingsError."""
    tasks = read_tasks(choice.prompts)
    chosen = parse_tasks(choice.only, list(tasks))
    model = load_served(config, parse_flags(flags)).settings.model
    threads = model.threads or os.cpu_count() or 1
    arguments = [*([] if config is None else ["--config", str(config)]), *flags, "--model.threads", str(threads), *SERVER_FLAGS]
    found: dict[str, Any] = {"model": model.served_name, "dtype": model.dtype, "quantize": model.quantize, "threads": threads}
    found |= {"max_tokens": choice.max_tokens, "summary": [], "parts": []}
    measured: dict[tuple[str, float], Answers] = {}
    with start_server(arguments) as server, ExitStack() as stack, Progress() as progress:
        fields = [{"speculation": {"drafter": each}, "seed": SEED, "return_token_ids": True} for each in choice.drafters]
        drafters = [stack.enter_context(closing(Server(server.url, fields=each))) for each in fields]
        cases = list(product(chosen, choice.temperatures))
        steps = progress.add_task("answering", total=len(cases) * (choice.questions + 1))
        for task, temperature in cases:
            turns, (*texts, warm_up) = list[list[Answer]](), fitting(server.client, tasks[task], choice)
            for number, text in enumerate((warm_up, *texts), start=-1):
                turns.append(in_turns(drafters, Question([user(text)]), number, temperature, choice.max_tokens))
                progress.advance(steps)
            answers = dict(zip(choice.drafters, map(list, zip(*turns[1:], strict=True)), strict=True))
            measured[task, temperature] = answers
            found["parts"].append({"task": task, "temperature": temperature, "rows": record(answers)})
            found["summary"] = list(summaries(measured))
            if out:
                report.save(out, found)
    for part in found["summary"]:
        title = f"{part['task']}, temperature {part['temperature']:g}, {part['questions']} questions"
        report.print_figures(title, COLUMNS, part["rows"])
    Console(highlight=False, markup=False).print(f"\n{LEGEND}")
    return found


def read_tasks(path: Path) -> dict[str, list[str]]:
    """The first turns of the questions, by task. Raises BenchError."""
    found: dict[str, list[str]] = {name: [] for name in (CHAT, *TASKS.values())}
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


def fitting(client: httpx.Client, texts: Sequence[str], choice: Choice) -> list[str]:
    """The first questions that leave room for an answer: `choice.questions`, and one that warms up. Raises BenchError."""
    questions: list[str] = []
    for text in texts:
        counted = client.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
        if "count" in counted and counted["count"] + choice.max_tokens <= counted["max_model_len"]:
            questions.append(text)
        if len(questions) > choice.questions:
            return questions
    raise BenchError(f"Only {len(questions)} questions of a task fit the context; --questions must be less than that.")


def record(answers: Answers) -> list[Row]:
    """What was measured of each answer, a row per drafter."""
    return [
        {
            "drafter": drafter,
            "tokens": [each.tokens for each in given],
            "seconds": [round(each.seconds, 4) for each in given],
            "first_token_seconds": [round(each.first_token_seconds or each.seconds, 4) for each in given],
            "steps": [each.steps for each in given],
        }
        for drafter, given in answers.items()
    ]


def summaries(measured: Mapping[tuple[str, float], Answers]) -> Iterator[dict[str, Any]]:
    """The figures of each task at each temperature, and of all tasks together."""
    for temperature in sorted({temperature for _, temperature in measured}):
        groups = {task: answers for (task, other), answers in measured.items() if other == temperature}
        if len(groups) > 1:
            drafters = next(iter(groups.values()))
            groups[ALL] = {name: [each for answers in groups.values() for each in answers[name]] for name in drafters}
        for task, answers in groups.items():
            questions = len(next(iter(answers.values())))
            yield {"task": task, "temperature": temperature, "questions": questions, "rows": figures(answers)}


def figures(answers: Answers) -> list[Row]:
    """A row of figures per drafter."""
    rows = []
    for drafter, given in answers.items():
        tokens, seconds = sum(each.tokens for each in given), sum(each.seconds for each in given)
        first = [each.first_token_seconds or each.seconds for each in given]
        row: Row = {"drafter": drafter, "tokens_per_second": round(tokens / seconds, 2)}
        if tokens > len(given):
            row["ms_per_token_after_prompt"] = round(1e3 * (seconds - sum(first)) / (tokens - len(given)), 3)
        row["first_token_ms"] = round(1e3 * statistics.median(first), 1)
        row["tokens_per_step"] = round(tokens / sum(each.steps or each.tokens for each in given), 3)
        if drafter != PLAIN and PLAIN in answers:
            pairs = list(zip(given, answers[PLAIN], strict=True))
            ratios = [own.tokens / own.seconds / (plain.tokens / plain.seconds) for own, plain in pairs]
            row["over_none"] = round(statistics.median(ratios), 3)
            row["same_as_none"] = f"{sum(own.ids == plain.ids for own, plain in pairs)}/{len(pairs)}"
        rows.append(row)
    return rows
