"""`outrider bench decode`: tokens per second and per step, in process, drafters taken in turn over the same prompts."""

from __future__ import annotations

import gzip
import json
import resource
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from drafters.draft import Ints
from drafters.registry import NAMES, DrafterName, make
from server.settings import Settings
from server.worker import Engine, load
from verify.decode import Decoded, DecodeOptions, decode
from verify.sampling import SamplingParams
from verify.verifier import TreeVerifier


class BenchError(ValueError):
    """The benchmark cannot run; the message says why."""


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    drafters: Sequence[DrafterName]
    prompts: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    repeats: int
    seed: int = 0


@dataclass
class Tally:
    """The answers of one drafter at one temperature, over all repeats."""

    tokens_per_second: list[float] = field(default_factory=list)  # one per repeat
    tokens: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "commit": 0.0})
    answers: list[list[int]] = field(default_factory=list)  # of the last repeat

    def add(self, answers: Sequence[Decoded]) -> None:
        """One repeat."""
        steps = [step for answer in answers for step in answer.steps]
        tokens = sum(len(answer.tokens) for answer in answers)
        phases = {
            "draft": sum(step.draft_seconds for step in steps),
            "verify": sum(step.verify_seconds for step in steps),
            "commit": sum(step.commit_seconds for step in steps),
        }
        for phase, seconds in phases.items():
            self.seconds[phase] += seconds
        self.tokens += tokens
        self.steps += len(steps)
        self.tokens_per_second.append(tokens / sum(phases.values()))
        self.answers = [answer.tokens for answer in answers]

    def figures(self) -> dict[str, Any]:
        """The medians and means that are reported."""
        return {
            "tokens_per_second": round(statistics.median(self.tokens_per_second), 2),
            "tokens_per_second_runs": [round(value, 2) for value in self.tokens_per_second],
            "tokens_per_step": round(self.tokens / self.steps, 4),
            **{f"{phase}_ms_per_step": round(1e3 * s / self.steps, 4) for phase, s in self.seconds.items()},
        }


def read_prompts(path: Path, limit: int | None) -> list[str]:
    """The field `prompt` (or the first of `turns`) of each line of a .jsonl or .jsonl.gz file. Raises BenchError."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found = [json.loads(line) for line in data.splitlines()]
        prompts = [line.get("prompt") or line["turns"][0] for line in found]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise BenchError(f'{path} is no file of prompts ({error}); give .jsonl lines with a field "prompt".') from None
    return [str(prompt) for prompt in prompts[:limit]]


def parse_names(drafters: str) -> list[DrafterName]:
    """The drafters named in a list separated by commas. Raises BenchError."""
    named = drafters.split(",")
    unknown = [name for name in named if name not in NAMES]
    if unknown:
        raise BenchError(f"There is no drafter {', '.join(unknown)}; there are {', '.join(NAMES)}.")
    return [name for name in NAMES if name in named]


def make_plan(drafters: str, prompts: Path, limit: int | None, temperatures: str, max_tokens: int, repeats: int) -> Plan:
    """The plan that the command line asks for, lists separated by commas. Raises BenchError."""
    try:
        numbers = [float(value) for value in temperatures.split(",")]
    except ValueError:
        raise BenchError(f"--temperature takes numbers separated by commas, not {temperatures!r}.") from None
    return Plan(parse_names(drafters), read_prompts(prompts, limit), numbers, max_tokens, repeats)


def run(settings: Settings, plan: Plan, out: Path | None) -> dict[str, Any]:
    """Measures and prints; with `out`, saves the figures there, too."""
    engine = load(settings)
    prompts = [encode(engine, prompt) for prompt in plan.prompts]
    tallies = {(t, d): Tally() for t in plan.temperatures for d in plan.drafters}
    with Progress() as progress:
        task = progress.add_task("decoding", total=(plan.repeats + 1) * len(tallies))
        for repeat in range(plan.repeats + 1):
            for (temperature, drafter), tally in tallies.items():
                chosen = prompts if repeat else prompts[:2]  # the first round only warms up
                answers = [answer(engine, settings, drafter, prompt, temperature, plan) for prompt in chosen]
                if repeat:
                    tally.add(answers)
                progress.advance(task)
    figures = {
        "model": settings.model.served_name,
        "dtype": str(engine.runner.cache_shape.dtype),
        "prompts": len(prompts),
        "max_tokens": plan.max_tokens,
        "max_nodes": settings.speculation.max_nodes,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "results": [
            {"drafter": d, "temperature": t, **tally.figures(), "same_tokens_as_first": same(tallies, plan, t, tally)}
            for (t, d), tally in tallies.items()
        ],
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def encode(engine: Engine, prompt: str) -> Ints:
    """The prompt's token ids, int32 [P]."""
    return np.array(engine.tokenizer.encode(prompt), np.int32)


def answer(engine: Engine, settings: Settings, drafter: DrafterName, prompt: Ints, temperature: float, plan: Plan) -> Decoded:
    """One answer with fresh state, as a request without a session gets it."""
    verifier = TreeVerifier(engine.runner, engine.runner.new_cache())
    params = SamplingParams(temperature=temperature, seed=plan.seed)
    budget = engine.budget(drafter, settings.speculation.max_nodes)
    options = DecodeOptions(params, plan.max_tokens, engine.stop_ids, **budget)
    return decode(verifier, make(drafter, engine.resources), prompt, options)


def same(tallies: dict[tuple[float, DrafterName], Tally], plan: Plan, temperature: float, tally: Tally) -> str:
    """How many answers equal the first drafter's, as "n/m"."""
    first = tallies[temperature, plan.drafters[0]].answers
    return f"{sum(a == b for a, b in zip(first, tally.answers, strict=True))}/{len(first)}"


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table("temperature", "drafter", "tokens/s", "tokens/step", "draft ms", "verify ms", "commit ms", "same tokens")
    for row in figures["results"]:
        phases = (f"{row[f'{phase}_ms_per_step']:.3f}" for phase in ("draft", "verify", "commit"))
        cells = (f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_step']:.3f}", *phases, row["same_tokens_as_first"])
        table.add_row(str(row["temperature"]), row["drafter"], *cells)
    Console().print(table)
