"""Measures servers question by question in turns, because the machine's speed changes over time, and shows what it found."""

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean, median, quantiles
from types import MappingProxyType
from typing import Any

import httpx
from rich.progress import Progress

from bench import report
from bench.http.chat import Answer, ask
from bench.pair.prompts import TASKS, Question, after, apart
from bench.plan import BenchError

TIMEOUT_SECONDS = 3600.0
SEED = 1


class Server:
    """A server's model, and its answers. Raises BenchError for one that does not answer."""

    def __init__(self, url: str, key: str | None = None, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        """`fields` replace those of each question; some are for Outrider's servers alone, such as `speculation`."""
        self._fields = fields
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT_SECONDS, headers=headers)
        try:
            card = self._client.get("/v1/models").raise_for_status().json()["data"][0]
            self.model = str(card["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            self.close()
            raise BenchError(f"{url} does not answer as a server of OpenAI's API ({error}); give the URL of one.") from None
        found, build = self._get("/version"), self._get("/props").get("build_info")
        self._is_outrider = "invariant_rows" in found
        owner = "Outrider" if self._is_outrider else "llama.cpp" if build else card.get("owned_by") or "a server"
        self.program = f"{owner} {found.get('version') or build or ''}".strip()

    def close(self) -> None:
        self._client.close()

    def _get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path that not every server has; empty without one."""
        try:
            found = self._client.get(path)
            answer = found.json() if found.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    @property
    def family(self) -> str:
        """The model's name without folder, ending and case: equal for servers of the same file."""
        return self.model.rpartition("/")[2].removesuffix(".gguf").casefold()

    def answer(self, question: Question, temperature: float, max_tokens: int) -> Answer:
        """Streams an answer. Raises BenchError."""
        body = {"model": self.model, "messages": question.messages, "temperature": temperature, "max_tokens": max_tokens}
        fields = {**question.fields, **self._fields}
        if self._is_outrider:
            fields["speculation"] = {**fields.get("speculation", {}), "report": True}
        return ask(self._client, body | {"seed": SEED} | fields)


ALL = "all"
COLUMNS = {
    "task": "task",
    "after": "after",
    "t": "temperature:g",
    "server": "server",
    "first\ntoken s": "first_seconds:.2f",
    "tokens/s": "rate:.1f",
    "middle\nhalf": "spread",
    "per\nstep": "per_step:.2f",
    "ratio": "ratio:.2f",
    "equal": "equal",
}


@dataclass(frozen=True)
class Choice:
    tasks: Sequence[str]
    contexts: Sequence[int]  # tokens of files before a question
    temperatures: Sequence[float]
    questions: int  # per task
    max_tokens: int


@dataclass(frozen=True)
class Part:
    """One task at one temperature and one length of context: the answers of all servers."""

    task: str
    context: int
    temperature: float
    answers: Sequence[Sequence[Answer]]  # by question, then by server


def run(urls: Sequence[str], choice: Choice, key: str | None, force: bool, out: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. Raises BenchError."""
    if unknown := [task for task in choice.tasks if task not in TASKS]:
        raise BenchError(f"There is no task {', '.join(unknown)}; choose from {', '.join(TASKS)}.")
    if any(context < 0 for context in choice.contexts):
        raise BenchError("--context takes numbers of at least 0.")
    if len(urls) < 2:
        raise BenchError("Give two URLs or more, of servers that are to be compared.")
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(Server(url, key))) for url in urls]
        if len({server.family for server in servers}) > 1 and not force:
            names = ", ".join(server.model for server in servers)
            raise BenchError(f"The servers have different models ({names}); compare them with --force if that is meant.")
        parts = list(measure(servers, choice))
    rows = [row for part in parts for row in part_rows(part)]
    rows += [{"task": ALL, "server": name(number), "ratio": ratio(parts, number) or 1.0} for number in range(len(servers))]
    figures = {
        "servers": [
            {"name": name(i), "url": each.url, "model": each.model, "program": each.program} for i, each in enumerate(servers)
        ],
        "rows": rows,
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def measure(servers: Sequence[Server], choice: Choice) -> Iterator[Part]:
    """Asks all servers each question, and begins with another server each time."""
    cases, run_name = list(product(choice.tasks, choice.contexts, choice.temperatures)), secrets.token_hex(3)
    with Progress() as progress:
        steps = progress.add_task("answering", total=len(cases) * choice.questions)
        for server in servers:  # the first answer of a process is slower
            server.answer(Question([{"role": "user", "content": "Hello"}]), 0.0, 8)
        for case, (task, context, temperature) in enumerate(cases):
            found = []
            for number in range(choice.questions):
                question = apart(after(context, TASKS[task](number)), f"{run_name}-{case}-{number}")
                found.append(in_turns(servers, question, number, temperature, choice.max_tokens))
                progress.advance(steps)
            yield Part(task, context, temperature, found)


def in_turns(servers: Sequence[Server], question: Question, number: int, temperature: float, max_tokens: int) -> list[Answer]:
    """The servers' answers to a question, whose `number` says which server begins."""
    answers: dict[int, Answer] = {}
    for turn in range(len(servers)):
        place = (turn + number) % len(servers)
        answers[place] = servers[place].answer(question, temperature, max_tokens)
    return [answers[place] for place in range(len(servers))]


def part_rows(part: Part) -> Iterator[dict[str, Any]]:
    for number, answers in enumerate(zip(*part.answers, strict=True)):
        rates = [answer.rate for answer in answers if answer.rate]
        steps = [answer.tokens / answer.steps for answer in answers if answer.steps]
        row: dict[str, Any] = {
            "task": part.task,
            "after": part.context,
            "temperature": part.temperature,
            "server": name(number),
            "first_seconds": round(median(answer.first_token_seconds or 0.0 for answer in answers), 3),
        }
        if rates:
            middle = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else rates
            row |= {"rate": round(median(rates), 2), "spread": f"{middle[0]:.1f}-{middle[-1]:.1f}"}
        if (found := ratio([part], number)) is not None:
            row["ratio"] = round(found, 3)
        if steps:
            row["per_step"] = round(fmean(steps), 2)
        if number:
            row["equal"] = equality([(question[0].text or "", question[number].text or "") for question in part.answers])
        yield row


def ratio(parts: Sequence[Part], number: int) -> float | None:
    """How many times as fast the first server is as this one: the mean over questions of the ratios of tokens per second.

    None if no question has both.
    """
    pairs = [(question[0].rate, question[number].rate) for part in parts for question in part.answers]
    ratios = [first / other for first, other in pairs if first and other]
    return geometric_mean(ratios) if ratios else None


def equality(texts: Sequence[tuple[str, str]]) -> str:
    """How many texts are equal, and after how many characters the others part at the earliest."""
    parted = [common(one, other) for one, other in texts if one != other]
    count = f"{len(texts) - len(parted)}/{len(texts)}"
    return f"{count}, {min(parted)}" if parted else count


def common(one: str, other: str) -> int:
    """The number of characters that two texts begin with in common."""
    return next(
        (i for i, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), min(len(one), len(other))
    )


def name(number: int) -> str:
    """A, B, C..."""
    return chr(ord("A") + number)


def show(figures: Mapping[str, Any]) -> None:
    """Prints a table, the same in Markdown, and a line to paste."""
    legend = [f"{each['name']}: {each['program']} at {each['url']}, {Path(each['model']).name}" for each in figures["servers"]]
    explained = (
        "after: tokens of files before the question. tokens/s: after the first one, the median, with the middle half of the "
        "questions; not told where a server holds most of the text back, as calls of tools are. per step: tokens of a forward. "
        "ratio: tokens/s of A over this server's, the geometric mean of the questions. equal: texts like A's, and after how "
        "many characters the first other one parts; 0 at temperature 0 may be another prompt."
    )
    report.print_figures("Servers in turns", COLUMNS, figures["rows"], "\n".join([*legend, explained]))
    print(f"\n{markdown(figures['rows'])}\n")
    ratios = {row["server"]: row["ratio"] for row in figures["rows"] if row["task"] == ALL}
    found = ", ".join(f"{ratios[name(i)]:.2f} times as fast as {name(i)}" for i in range(1, len(ratios)))
    print(f"A is {found} after the first token. {'; '.join(legend)}; {report.machine()}")


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = [head.replace("\n", " ") for head in COLUMNS]
    figures = [column.partition(":")[::2] for column in COLUMNS.values()]
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(format(row[key], spec) if key in row else "" for key, spec in figures) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
