"""`outrider bench edit`: files written again with changes, plainly and with drafts from several sources, in turns.

A running server is asked for them. Without one, a model in this process emits the file that is asked for, whatever its logits
say (forced replay): steps cost what they cost, and every change is made.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.progress import track

from bench import report
from bench.http.chat import Answer
from bench.model.streams import Recorded
from bench.pair.prompts import TOKEN_CHARACTERS, Question, apart, folder, user
from bench.pair.run import Server
from bench.plan import BenchError
from outrider.drafters.interface import NOTHING
from outrider.drafters.registry import make
from outrider.drafters.tables import suffix
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load
from outrider.verify.decode import finish
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

CORPUS = "outrider-bench-edit"
# The speed of plain decoding hardly depends on the length of the answer.
PLAIN_TOKENS = 64
PLAIN, PROMPT, IN_CORPUS, PREDICTION = "plain", "prompt", "corpus", "prediction"
# Fields of requests; those of a question have the prediction.
WAYS: Mapping[str, dict[str, Any]] = {
    PLAIN: {"prediction": None, "speculation": {"drafter": "none"}, "max_tokens": PLAIN_TOKENS},
    PROMPT: {"prediction": None},
    IN_CORPUS: {"prediction": None, "speculation": {"corpus": CORPUS}},
    PREDICTION: {},
}
# A change renames the first such word of a line.
WORD = re.compile(r"\b[a-z]{5,}\b")
COLUMNS = {
    "file": "file_tokens",
    "changes": "changes",
    "drafts from": "way",
    "tokens": "tokens",
    "tokens/s": "rate:.1f",
    "over\nplain": "over_plain:.2f",
    "per\nstep": "per_step:.1f",
    "as asked": "as_asked",
}
LEGEND = (
    "prompt: the file is in the prompt, as in all requests. tokens/s: after the first one. as asked: lines of the answer that "
    "are in the file with all changes."
)


def run(
    url: str | None,
    settings: Settings,
    sizes: Sequence[int],
    changes: Sequence[int],
    most: int,
    key: str | None,
    out: Path | None,
) -> None:
    """Measures at temperature 0, prints, and saves if `out` is given. Answers are cut to `most` tokens. Raises BenchError."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if url:
            servers = [stack.enter_context(closing(Server(url, key, fields))) for fields in WAYS.values()]
        else:
            model = Forced(settings)
        for size, count in track(list(product(sizes, changes)), "Edits"):
            text = file_of(size)
            question, wanted = edit(text, count)
            if url:
                post_corpus(servers[0].url, key, text)
                asked = (
                    (server, apart(question, secrets.token_hex(4))) for server in servers
                )  # nothing is learned of other answers
                answers = [server.answer(each, 0.0, most) for server, each in asked]
            else:
                answers = list(model.answers(question, wanted, most))
            for way, answer in zip(WAYS, answers, strict=True):
                rows.append({"file_tokens": size, "changes": count, "way": way, **figures(answer, answers[0], wanted)})
            if out:
                report.save(out, {"model": servers[0].model if url else settings.model.served_name, "rows": rows})
    report.print_figures("Edits", COLUMNS, rows, LEGEND)


def file_of(tokens: int) -> str:
    """Whole lines of the drafters' package, of about this many tokens."""
    text = "\n".join(file.read_text() for file in sorted(folder().rglob("*.py")))
    return text[: text.rindex("\n", 0, tokens * TOKEN_CHARACTERS) + 1]


def edit(text: str, changes: int) -> tuple[Question, str]:
    """A question that asks to change `changes` lines of a file, and the changed file."""
    lines = text.splitlines()
    once = [number for number, line in enumerate(lines) if lines.count(line) == 1 and WORD.search(line)]
    if len(once) < changes:
        raise BenchError(f"A file of {len(text) // TOKEN_CHARACTERS} tokens has no {changes} lines to change.")
    asked = []
    for number in (once[place * len(once) // changes] for place in range(changes)):
        line = lines[number]
        lines[number] = WORD.sub(r"new_\g<0>", line, count=1)
        asked.append(f"- Replace `{line.strip()}` by `{lines[number].strip()}`\n")
    content = (
        f"```python\n{text}```\n\nReplace these lines of the file:\n{''.join(asked)}\n"
        "Answer with the whole file, all other lines as they are, and nothing else."
    )
    return Question([user(content)], {"prediction": {"type": "content", "content": text}}), "\n".join(lines)


def post_corpus(url: str, key: str | None, text: str) -> None:
    """Makes the file the corpus of the benchmark. Raises BenchError."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    files = [{"path": "file.py", "text": text}]
    response = httpx.post(f"{url}/v1/outrider/corpora", json={"name": CORPUS, "files": files}, headers=headers, timeout=60)
    if response.status_code != 200:
        raise BenchError(f"The server takes no corpus ({response.status_code}); give the URL of Outrider.")


class Forced:
    """A model in this process that answers with the file that is asked for. Raises what loading raises."""

    def __init__(self, settings: Settings) -> None:
        self._runtime = load(settings)
        self._rule = Recorded(NOTHING)
        # One text for all answers, so that a prompt is read once.
        self._verifier = Verifier(self._runtime.runner, self._runtime.runner.new_cache(), lambda _: self._rule)

    def answers(self, question: Question, wanted: str, most: int) -> Iterator[Answer]:
        """The answer in all ways."""
        texts = question.messages[0]["content"], question.fields["prediction"]["content"], wanted
        prompt, expected, target = (np.array(self._runtime.tokenizer.encode(each), np.int32) for each in texts)
        resources = self._runtime.resources
        separator = resources.vocabulary - 1
        corpus = (suffix.index(np.concatenate([[separator], expected]), separator),)
        for way in WAYS:
            answer = target[: PLAIN_TOKENS if way == PLAIN else most]
            self._rule = Recorded(answer)
            known = replace(resources, corpus=corpus) if way == IN_CORPUS else resources
            drafter = make("none" if way == PLAIN else "fusion", known)
            prediction, budget = tuple(expected.tolist()) if way == PREDICTION else (), self._runtime.budget("auto")
            options = DecodeOptions(SamplingParams(temperature=0), len(answer), frozenset(), *budget, prediction)
            steps = finish(Stream(self._verifier, drafter, prompt, options)).steps
            seconds = [step.draft_seconds + step.verify_seconds + step.commit_seconds for step in steps]
            yield Answer(len(answer), sum(seconds), None, len(steps), seconds[0])


def figures(answer: Answer, plain: Answer, wanted: str) -> dict[str, Any]:
    """Figures of an answer beside the plain one."""
    row: dict[str, Any] = {"tokens": answer.tokens}
    row |= {"rate": round(answer.rate, 2), "per_step": round(answer.tokens / (answer.steps or answer.tokens), 2)}
    if answer is plain:
        return row
    row["over_plain"] = round(answer.rate / plain.rate, 3)
    if answer.text is not None:
        lines, asked = answer.text.splitlines(), set(wanted.splitlines())
        row["as_asked"] = f"{sum(line in asked for line in lines)}/{len(lines)}"
    return row
