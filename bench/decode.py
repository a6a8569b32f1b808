"""`outrider bench decode`: tokens per second and per step, in process; drafters take turns on the same prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from bench import report
from bench.plan import Plan
from outrider.drafters.interface import Ints
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import make
from outrider.server.settings import Settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.decode import Decoded, finish
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

PHASES = ("draft", "verify", "commit")
WARM_UP_PROMPTS = 2


@dataclass
class Tally:
    """The answers of one drafter at one temperature, over all repeats."""

    tokens_per_second: list[float] = field(default_factory=list)  # one per repeat
    tokens: int = 0
    steps: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    answers: list[list[int]] = field(default_factory=list)  # token ids; of the last repeat

    def add(self, answers: Sequence[Decoded], seconds: float) -> None:
        """Adds one repeat and its duration."""
        steps = [step for answer in answers for step in answer.steps]
        self.seconds["draft"] += sum(step.draft_seconds for step in steps)
        self.seconds["verify"] += sum(step.verify_seconds for step in steps)
        self.seconds["commit"] += sum(step.commit_seconds for step in steps)
        self.steps += len(steps)
        tokens = sum(len(answer.tokens) for answer in answers)
        self.tokens += tokens
        self.tokens_per_second.append(tokens / seconds)
        self.answers = [answer.tokens for answer in answers]

    def figures(self) -> dict[str, Any]:
        """Medians and means, rounded."""
        return {
            "tokens_per_second": round(statistics.median(self.tokens_per_second), 2),
            "tokens_per_second_runs": [round(value, 2) for value in self.tokens_per_second],
            "tokens_per_step": round(self.tokens / self.steps, 4),
            **{f"{phase}_ms_per_step": round(1e3 * s / self.steps, 4) for phase, s in self.seconds.items()},
        }


def run(settings: Settings, plan: Plan, out: Path | None, options: Options | None = None) -> dict[str, Any]:
    """Measures, prints, and saves the figures if `out` is given. `options` are the drafters', instead of the settings'."""
    runtime = load(settings)
    if options is not None:
        runtime.resources = replace(runtime.resources, options=options)
    prompts = [encode(runtime, prompt) for prompt in plan.prompts]
    tallies = {(temperature, name): Tally() for temperature in plan.temperatures for name in plan.drafters}
    with Progress() as progress:
        task = progress.add_task("decoding", total=(plan.repeats + 1) * len(tallies))
        for repeat in range(plan.repeats + 1):
            for (temperature, name), tally in tallies.items():
                started = time.perf_counter()
                asked = prompts if repeat else prompts[:WARM_UP_PROMPTS]
                answers = [answer(runtime, settings, name, prompt, temperature, plan) for prompt in asked]
                if repeat:
                    tally.add(answers, time.perf_counter() - started)
                progress.advance(task)
    figures = collect(runtime, settings, plan, tallies)
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def collect(
    runtime: Runtime, settings: Settings, plan: Plan, tallies: Mapping[tuple[float, DrafterName], Tally]
) -> dict[str, Any]:
    """The figures of a run, as they are printed and saved."""
    runner = runtime.runner
    return {
        "model": settings.model.served_name,
        "dtype": runner.dtypes[0],
        "weight_bits": runner.weight_bits,
        "kv_dtype": runner.dtypes[1],
        "prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "max_nodes": settings.speculation.max_nodes,
        "weights_mb": round(runner.weight_bytes / 1e6, 1),
        "results": [
            {
                "drafter": name,
                "temperature": temperature,
                **tally.figures(),
                "same_tokens_as_first": count_equal(tallies[temperature, plan.drafters[0]].answers, tally.answers),
            }
            for (temperature, name), tally in tallies.items()
        ],
    }


def encode(runtime: Runtime, prompt: str) -> Ints:
    """The prompt's token ids, int32 [P]."""
    return np.array(runtime.tokenizer.encode(prompt), np.int32)


def answer(runtime: Runtime, settings: Settings, drafter: DrafterName, prompt: Ints, temperature: float, plan: Plan) -> Decoded:
    """Decodes one answer with fresh state, like a request without a session."""
    verifier = Verifier(runtime.runner, runtime.runner.new_cache())
    params = SamplingParams(temperature=temperature, seed=plan.seed)
    options = DecodeOptions(params, plan.max_tokens, runtime.stop_ids, *runtime.budget(settings.speculation.max_nodes))
    return finish(Stream(verifier, make(drafter, runtime.resources), prompt, options))


def count_equal(expected: Sequence[list[int]], answers: Sequence[list[int]]) -> str:
    """The number of answers that equal the expected ones, as "n/m"."""
    return f"{sum(a == b for a, b in zip(expected, answers, strict=True))}/{len(expected)}"


def show(figures: dict[str, Any]) -> None:
    """Prints two tables: speed, and where a step's time goes."""
    rows = figures["results"]
    report.print_figures(
        "Speed (median of the repeats)",
        {
            "temp.": "temperature",
            "drafter": "drafter",
            "tokens/s": "tokens_per_second:.1f",
            "tokens\nper step": "tokens_per_step:.3f",
            "same\ntokens": "same_tokens_as_first",
        },
        rows,
        f"same tokens: answers equal to those of {rows[0]['drafter']}.",
    )
    report.print_figures(
        "Mean time per step",
        {
            "temp.": "temperature",
            "drafter": "drafter",
            **{f"{phase}\nms": f"{phase}_ms_per_step:.3f" for phase in PHASES},
        },
        rows,
    )
