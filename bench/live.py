"""`outrider bench live`: the drafters of a served model on tasks of Spec-Bench and on other prompts.

The drafters answer each question in turns, because the machine's speed changes over time, and so do servers beside them. Every
question is a session of its own, from which no other one learns.
"""

import gzip
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.http.chat import Answer
from bench.http.process import TIMEOUT_SECONDS, start_server
from bench.pair.prompts import Question, user
from bench.pair.run import Server
from bench.plan import BenchError
from bench.record import Record, Row, digest

# The tasks by Spec-Bench's category. The categories of MT-Bench are one task.
TASKS: Mapping[str, str] = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "qa",
    "math_reasoning": "math",
    "rag": "rag",
}
CHAT, CODE, MATH = "chat", "code", "math"
COMPLETE = "Complete this function. Answer with the code only.\n\n"
ALL = "all"  # the summary of every task
PLAIN = "none"
SEED = 0
WARM_UP, WARM_UP_TOKENS = Question([user("Write a short story about a lighthouse.")]), 48
STRIDE = 11  # chosen questions are far from each other, as neighbours are of one kind
# Sampling as requests say, and nothing known of earlier questions.
SERVER_FLAGS = ("--model.generation_config", "none", "--sessions.automatic", "off")
COLUMNS = {
    "system": "system",
    "tokens/s": "tokens_per_second:.1f",
    "ms/token,\nno prompt": "ms_per_token_after_prompt:.1f",
    "tokens\n/step": "tokens_per_step:.2f",
    "first\nms": "first_token_ms:.0f",
    "over\nnone": "over_none:.2f",
    "equal": "same_as_none",
}
LEGEND = (
    "tokens/s: of whole requests, prompts included; ms/token: from the first token on. over none: the geometric mean over the "
    "questions of tokens/s over plain decoding's. equal: texts that are those of plain decoding."
)


@dataclass(frozen=True)
class Choice:
    prompts: Sequence[Path]
    questions: int  # per task
    drafters: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    only: str = ""  # comma-separated names of tasks; empty measures all
    beside: Mapping[str, str] = field(default_factory=dict)  # URLs of running servers, by the name to show
    url: str | None = None  # of a running server, instead of one that is started


def run(config: Path | None, flags: Sequence[str], choice: Choice, out: Path | None) -> dict[str, Any]:
    """Measures what `out` does not have yet, saves each answer, and prints. Raises BenchError and SettingsError."""
    tasks = read_tasks(choice.prompts)
    chosen = parse_tasks(choice.only, list(tasks))
    arguments = [*([] if config is None else ["--config", str(config)]), *flags, *SERVER_FLAGS]
    with ExitStack() as stack, Progress() as progress:
        url = choice.url or stack.enter_context(start_server(arguments)).url
        systems = {name: stack.enter_context(closing(each)) for name, each in servers(url, choice)}
        about = {"model": next(iter(systems.values())).family, "max_tokens": choice.max_tokens}
        record = Record(out, about, ("task", "question", "temperature", "system"))
        for each in systems.values():  # the first answer of a process is slower
            each.answer(WARM_UP, 0.0, WARM_UP_TOKENS)
        client = stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS))
        texts = {task: fitting(client, tasks[task], choice) for task in chosen}
        cases = list(product(range(choice.questions), chosen, choice.temperatures))
        for turn, (number, task, temperature) in enumerate(progress.track(cases, description="answering")):
            first = turn % len(systems)
            for name in [*systems][first:] + [*systems][:first]:
                place = {"task": task, "question": number, "temperature": temperature, "system": name}
                if not record.has(place):
                    answer = systems[name].answer(Question([user(texts[task][number])]), temperature, choice.max_tokens)
                    record.add(place, figures_of(answer))
    found = {"summary": list(summaries(record.answers))}
    record.save(found)
    for part in found["summary"]:
        title = f"{part['task']}, temperature {part['temperature']:g}, {part['questions']} questions"
        report.print_figures(title, COLUMNS, part["rows"])
    Console(highlight=False, markup=False).print(f"\n{LEGEND}")
    return found


def servers(url: str, choice: Choice) -> Iterator[tuple[str, Server]]:
    """The drafters as systems to ask, and the servers beside them. Raises BenchError."""
    for drafter in choice.drafters:
        yield drafter, Server(url, fields={"speculation": {"drafter": drafter}, "seed": SEED})
    for name, other in choice.beside.items():
        yield name, Server(other, fields={"seed": SEED, "cache_prompt": False})


def read_tasks(paths: Sequence[Path]) -> dict[str, list[str]]:
    """The first turns of the questions, by task. Raises BenchError."""
    found: dict[str, list[str]] = {name: [] for name in (CHAT, *TASKS.values(), CODE)}
    for path in paths:
        try:
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            for line in data.splitlines():
                task, text = question_of(json.loads(line))
                found[task].append(text)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise BenchError(
                f"Cannot read questions from {path} ({error}); give Spec-Bench's question.jsonl, whose lines have `category` "
                "and `turns`, HumanEval's problems, which have a `prompt`, or GSM8K's, which have a `question`."
            ) from None
    return {name: texts for name, texts in found.items() if texts}


def question_of(record: Mapping[str, Any]) -> tuple[str, str]:
    """The task and the text of a line of Spec-Bench, HumanEval or GSM8K."""
    if "prompt" in record:
        return CODE, COMPLETE + str(record["prompt"])
    if "question" in record:
        return MATH, str(record["question"])
    return TASKS.get(record["category"], CHAT), str(record["turns"][0])


def parse_tasks(text: str, present: Sequence[str]) -> list[str]:
    """Comma-separated names of tasks, all of them for an empty text. Raises BenchError."""
    names = text.split(",") if text else list(present)
    if unknown := [name for name in names if name not in present]:
        raise BenchError(f"There are no questions of the task {', '.join(unknown)}; choose from {', '.join(present)}.")
    return [name for name in present if name in names]


def fitting(client: httpx.Client, texts: Sequence[str], choice: Choice) -> list[str]:
    """`choice.questions` questions, far from each other, that leave room for an answer. Raises BenchError."""
    questions: list[str] = []
    for number in sorted(range(len(texts)), key=lambda number: number * STRIDE % len(texts)):
        text = texts[number]
        counted = client.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()
        if "count" in counted and counted["count"] + choice.max_tokens <= counted["max_model_len"]:
            questions.append(text)
        if len(questions) == choice.questions:
            return questions
    raise BenchError(f"Only {len(questions)} questions of a task fit the context; --questions must be at most that.")


def figures_of(answer: Answer) -> Row:
    return {
        "tokens": answer.tokens,
        "seconds": round(answer.seconds, 4),
        "first_token_seconds": round(answer.first_token_seconds or answer.seconds, 4),
        "steps": answer.steps or answer.tokens,
        "text": digest(answer.text or ""),
    }


def summaries(answers: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The figures of each task at each temperature, and of all tasks together, for the questions that all systems answered."""
    cells: dict[tuple[float, str, int], dict[str, Row]] = {}
    for row in answers:
        cells.setdefault((row["temperature"], row["task"], row["question"]), {})[row["system"]] = row
    systems = list(dict.fromkeys(row["system"] for row in answers))
    whole = {place: {name: cell[name] for name in systems} for place, cell in cells.items() if len(cell) == len(systems)}
    for temperature in sorted({temperature for temperature, _, _ in whole}):
        groups: dict[str, list[dict[str, Row]]] = {}
        for (other, task, _), cell in whole.items():
            if other == temperature:
                groups.setdefault(task, []).append(cell)
        if len(groups) > 1:
            groups[ALL] = [cell for part in groups.values() for cell in part]
        for task, part in groups.items():
            yield {"task": task, "temperature": temperature, "questions": len(part), "rows": figures(part)}


def figures(cells: Sequence[Mapping[str, Row]]) -> list[Row]:
    """A row of figures per system, from the answers of all systems to each question."""
    rows = []
    for system in cells[0]:
        own = [cell[system] for cell in cells]
        tokens, seconds = sum(each["tokens"] for each in own), sum(each["seconds"] for each in own)
        first = [each["first_token_seconds"] for each in own]
        row: Row = {"system": system, "tokens_per_second": round(tokens / seconds, 2)}
        if tokens > len(own):
            row["ms_per_token_after_prompt"] = round(1e3 * (seconds - sum(first)) / (tokens - len(own)), 3)
        row["first_token_ms"] = round(1e3 * statistics.median(first), 1)
        row["tokens_per_step"] = round(tokens / sum(each["steps"] for each in own), 3)
        if system != PLAIN and PLAIN in cells[0]:
            plain = [cell[PLAIN] for cell in cells]
            ratios = [a["tokens"] * b["seconds"] / (b["tokens"] * a["seconds"]) for a, b in zip(own, plain, strict=True)]
            row["over_none"] = round(statistics.geometric_mean(ratios), 3)
            equal = sum(a["text"] == b["text"] for a, b in zip(own, plain, strict=True))
            row["same_as_none"] = f"{equal}/{len(own)}"
        rows.append(row)
    return rows
