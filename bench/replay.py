"""`outrider bench replay`: drafters against recorded answers, without a model. Exact for greedy decoding.

A verifier would accept the draft tokens that agree with the recorded text, and each step emits a bonus token. Each line of a
stream is a new session that reads its own prompt, so nothing is learned across lines. The first token of an answer is a step
without a draft.
"""

import json
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from bench import report
from bench.plan import BenchError
from outrider.drafters.interface import EMPTY, Drafter, Ints, Verdict
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make
from outrider.drafters.sequence import Sequence as Text
from outrider.drafters.tables import base_table, suffix
from outrider.drafters.tables.learned_text import LearnedText
from outrider.server.datastore_builder import DatastoreError, find_files, read_texts
from outrider.server.worker.runtime import LEARNED_TOKENS
from outrider.verify.errors import ModelError
from outrider.verify.sampling.acceptance import walk
from outrider.verify.tokenizer import load_tokenizer


class Encoder(Protocol):
    """The part of a tokenizer that benchmarks use."""

    def encode(self, text: str) -> list[int]: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Line:
    """A prompt and its recorded answer."""

    prompt: Ints  # int32 [P]
    answer: Ints  # int32 [A]


def load_encoder(path: str) -> Encoder:
    """A sentencepiece .model file, or a tokenizer folder or Hugging Face id. Raises BenchError."""
    if path.endswith(".model"):
        import sentencepiece

        try:
            return cast(Encoder, sentencepiece.SentencePieceProcessor(model_file=path))
        except (OSError, RuntimeError):  # which of them depends on the version
            raise BenchError(f"{path} is not a sentencepiece model.") from None
    try:
        return cast(Encoder, load_tokenizer(path))
    except ModelError as error:
        raise BenchError(str(error)) from None


def load_stream(path: Path, encoder: Encoder, limit: int | None) -> list[Line]:
    """The lines of a stream. Raises BenchError."""
    lines: list[Line] = []
    try:
        for text in path.read_text().splitlines()[:limit]:
            record = json.loads(text)
            prompt, answer = (np.array(encoder.encode(record[name]), np.int32) for name in ("prompt", "response"))
            lines.append(Line(prompt, answer))
    except (OSError, ValueError, KeyError) as error:
        raise BenchError(f"Cannot read {path} ({error}); give .jsonl lines with `prompt` and `response`.") from None
    return lines


def load_resources(corpus: Sequence[Path], encoder: Encoder, options: Options) -> Resources:
    """The corpus as n-gram table and suffix index for the drafters; empty tables for an empty corpus. Raises BenchError.

    Each text is preceded by the separator `len(encoder)`.
    """
    separator, parts = len(encoder), list[NDArray[np.uint32]]()
    try:
        for file in find_files(corpus) if corpus else ():
            parts += [np.array([separator, *encoder.encode(text)], np.uint32) for text in read_texts(file)]
    except DatastoreError as error:
        raise BenchError(str(error)) from None
    if not parts:
        return Resources(options, vocabulary=separator + 1)
    tokens = np.concatenate(parts)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table"
        base_table.build(table, [tokens], "replay", separator)
        base = base_table.load(table)
        return Resources(options, base, [suffix.index(tokens, separator)], separator + 1)


@dataclass
class Tally:
    """One drafter over one stream at one node budget."""

    tokens: int = 0
    steps: int = 0
    seconds: list[float] = field(default_factory=list)  # of drafting and of learning, by step with a draft

    def figures(self) -> dict[str, Any]:
        """Tokens per step, and microseconds of a step's drafting and learning together."""
        microseconds = {f"us_{share}": value for share, value in report.quantiles(self.seconds, 1e6).items()}
        return {"tokens_per_step": round(self.tokens / self.steps, 4), "steps": self.steps, **microseconds}


def replay(drafter: Drafter, line: Line, budget: int, tally: Tally) -> None:
    """Replays one recorded answer and adds it to `tally`."""
    sequence = Text(line.prompt)
    drafter.begin(sequence)
    answer, position = line.answer, 0
    padded = np.concatenate([answer, np.full(1 + budget, -1, np.int32)])  # -1 is no token, so drafts past the end are rejected
    while position < len(answer):
        started = time.perf_counter()
        tree = drafter.propose(budget) if position else EMPTY
        proposed = time.perf_counter()
        chosen = padded[np.concatenate([[0], tree.depths]) + position]
        path, tokens = walk(tree, chosen.tolist().__getitem__)
        verdict = Verdict(tree, path, tokens).cut(len(answer) - position)
        verified = time.perf_counter()
        sequence.append(verdict.tokens)
        drafter.observe(verdict)
        if position:
            tally.seconds.append(proposed - started + time.perf_counter() - verified)
        position += len(verdict.tokens)
        tally.steps += 1
    tally.tokens += len(answer)
    drafter.end()


def learned(resources: Resources, lines: Sequence[Line]) -> Resources:
    """The resources of drafters after a key's earlier sessions had these texts."""
    text = LearnedText(LEARNED_TOKENS, resources.vocabulary)
    for number, line in enumerate(lines):
        text.add(number, np.concatenate([line.prompt, line.answer]))
    return replace(resources, corpus=(*resources.corpus, *text.complete()))


def run(
    recordings: Sequence[Path],
    tokenizer: str,
    corpus: Sequence[Path],
    limit: int | None,
    drafters: Collection[DrafterName],
    budgets: Collection[int],
    options: Options,
    out: Path | None,
    learn: bool = False,
) -> dict[str, Any]:
    """Replays every stream with every drafter at every node budget; prints, and saves if `out` is given. Raises BenchError.

    `corpus` are texts to index, and `limit` is the number of lines that are read of a stream.

    With `learn`, only the last half of each stream is replayed: alone, and after the first half was learned as sessions of a
    key are (`sessions.learn: key`).
    """
    encoder = load_encoder(tokenizer)
    resources = load_resources(corpus, encoder, options)
    streams: dict[str, tuple[list[Line], Resources]] = {}
    for path in recordings:
        lines = load_stream(path, encoder, limit)
        middle = len(lines) // 2 if learn else 0
        streams[path.stem] = lines[middle:], resources
        if learn:
            streams[f"{path.stem}, learned"] = lines[middle:], learned(resources, lines[:middle])
    rows: list[dict[str, Any]] = []
    with Progress() as progress:
        total = sum(len(lines) for lines, _ in streams.values()) * len(drafters) * len(budgets)
        task = progress.add_task("replaying", total=total)
        for stream, (lines, known) in streams.items():
            for name in drafters:
                for budget in budgets:
                    tally = Tally()
                    for line in lines:
                        replay(make(name, known), line, budget, tally)
                        progress.advance(task)
                    rows.append({"stream": stream, "drafter": name, "nodes": budget, **tally.figures()})
    figures = {"tokenizer": Path(tokenizer).name, "corpus": [path.name for path in corpus], "results": rows}
    show(rows)
    if out:
        report.save(out, figures)
    return figures


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table per stream."""
    columns = {
        "drafter": "drafter",
        "nodes": "nodes",
        "tokens\nper step": "tokens_per_step:.3f",
        "us p50": "us_p50",
        "us p99": "us_p99",
    }
    legend = "nodes: budget of a draft; us: microseconds of a step's drafting and of learning from its emitted tokens."
    for stream in dict.fromkeys(row["stream"] for row in rows):
        report.print_figures(stream, columns, [row for row in rows if row["stream"] == stream], legend)
