"""`outrider bench edit`: a file written again with changes, plainly and with drafts from several sources, in turns.

A model in this process emits the file that is asked for, whatever its logits say (forced replay): steps cost what they cost,
and every change is made.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench import report
from bench.http.chat import Answer
from bench.model.streams import Recorded
from bench.pair.prompts import TOKEN_CHARACTERS, folder
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

# The speed of plain decoding hardly depends on the length of the answer.
PLAIN_TOKENS = 64
# Where drafts come from. The file is in the prompt in all cases.
WAYS = PLAIN, PROMPT, CORPUS, PREDICTION = "plain", "prompt", "corpus", "prediction"
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
}
LEGEND = "prompt: the file is in the prompt, as in all requests. tokens/s: after the first one."


def run(settings: Settings, sizes: Sequence[int], changes: Sequence[int], most: int, out: Path | None) -> None:
    """Measures at temperature 0, prints, and saves if `out` is given. Answers are cut to `most` tokens. Raises BenchError."""
    rows: list[dict[str, Any]] = []
    model = Forced(settings)
    for size, count in track(list(product(sizes, changes)), "Edits"):
        text = file_of(size)
        answers = list(model.answers(text, *edit(text, count), most))
        for way, answer in zip(WAYS, answers, strict=True):
            rows.append({"file_tokens": size, "changes": count, "way": way, **figures(answer, answers[0])})
        if out:
            report.save(out, {"model": settings.model.served_name, "rows": rows})
    report.print_figures("Edits", COLUMNS, rows, LEGEND)


def file_of(tokens: int) -> str:
    """Whole lines of the drafters' package, of about this many tokens."""
    text = "\n".join(file.read_text() for file in sorted(folder().rglob("*.py")))
    return text[: text.rindex("\n", 0, tokens * TOKEN_CHARACTERS) + 1]


def edit(text: str, changes: int) -> tuple[str, str]:
    """A request to change `changes` lines of a file, and the changed file. Raises BenchError."""
    lines = text.splitlines()
    once = [number for number, line in enumerate(lines) if lines.count(line) == 1 and WORD.search(line)]
    if len(once) < changes:
        raise BenchError(f"A file of {len(text) // TOKEN_CHARACTERS} tokens has no {changes} lines to change.")
    asked = []
    for number in (once[place * len(once) // changes] for place in range(changes)):
        line = lines[number]
        lines[number] = WORD.sub(r"new_\g<0>", line, count=1)
        asked.append(f"- Replace `{line.strip()}` by `{lines[number].strip()}`\n")
    request = (
        f"```python\n{text}```\n\nReplace these lines of the file:\n{''.join(asked)}\n"
        "Answer with the whole file, all other lines as they are, and nothing else."
    )
    return request, "\n".join(lines)


class Forced:
    """A model in this process that answers with the file that is asked for. Raises what loading raises."""

    def __init__(self, settings: Settings) -> None:
        self._runtime = load(settings)
        self._rule = Recorded(NOTHING)
        # One text for all answers, so that a prompt is read once.
        self._verifier = Verifier(self._runtime.runner, self._runtime.runner.new_cache(), lambda _: self._rule)

    def answers(self, file: str, request: str, changed: str, most: int) -> Iterator[Answer]:
        """The answer in all ways."""
        prompt, expected, target = (
            np.array(self._runtime.tokenizer.encode(each), np.int32) for each in (request, file, changed)
        )
        resources = self._runtime.resources
        separator = resources.vocabulary - 1
        corpus = (suffix.index(np.concatenate([[separator], expected]), separator),)
        for way in WAYS:
            answer = target[: PLAIN_TOKENS if way == PLAIN else most]
            self._rule = Recorded(answer)
            known = replace(resources, corpus=corpus) if way == CORPUS else resources
            drafter = make("none" if way == PLAIN else "fusion", known)
            prediction, budget = tuple(expected.tolist()) if way == PREDICTION else (), self._runtime.budget("auto")
            options = DecodeOptions(SamplingParams(temperature=0), len(answer), frozenset(), *budget, prediction)
            steps = finish(Stream(self._verifier, drafter, prompt, options)).steps
            seconds = [step.draft_seconds + step.verify_seconds + step.commit_seconds for step in steps]
            yield Answer(len(answer), sum(seconds), None, len(steps), seconds[0])


def figures(answer: Answer, plain: Answer) -> dict[str, Any]:
    """Figures of an answer beside the plain one."""
    row: dict[str, Any] = {"tokens": answer.tokens}
    row |= {"rate": round(answer.rate, 2), "per_step": round(answer.tokens / (answer.steps or answer.tokens), 2)}
    return row if answer is plain else row | {"over_plain": round(answer.rate / plain.rate, 3)}
