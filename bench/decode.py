"""`outrider bench decode`: tokens per second and per step, in process; drafters and peers take turns over the same prompts."""

from __future__ import annotations

import gzip
import json
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import report
from bench.model.bandwidth import read_bytes_per_second
from bench.model.peers import PEERS, PeerName, Transformers
from drafters.interface import Ints
from drafters.options import NAMES, DrafterName
from drafters.registry import make
from server.settings import Settings
from server.worker.runtime import Runtime, load
from verify.decode import Decoded, DecodeOptions, Generation, finish
from verify.sampling_params import SamplingParams
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
    """The answers of one drafter or peer at one temperature, over all repeats."""

    tokens_per_second: list[float] = field(default_factory=list)  # one per repeat
    tokens: int = 0
    steps: int = 0  # 0 = the peer does not say
    seconds: dict[str, float] = field(default_factory=lambda: {"draft": 0.0, "verify": 0.0, "commit": 0.0})
    answers: list[list[int]] = field(default_factory=list)  # of the last repeat

    def add(self, answers: Sequence[Decoded], seconds: float) -> None:
        """One repeat, and the time it took."""
        steps = [step for answer in answers for step in answer.steps]
        self.seconds["draft"] += sum(step.draft_seconds for step in steps)
        self.seconds["verify"] += sum(step.verify_seconds for step in steps)
        self.seconds["commit"] += sum(step.commit_seconds for step in steps)
        self.steps += len(steps)
        self.add_tokens([answer.tokens for answer in answers], seconds)

    def add_tokens(self, answers: list[list[int]], seconds: float) -> None:
        """One repeat of a peer, which says nothing of its steps."""
        tokens = sum(len(answer) for answer in answers)
        self.tokens += tokens
        self.tokens_per_second.append(tokens / seconds)
        self.answers = answers

    def figures(self, weight_bytes: int, read_bytes_per_second: float) -> dict[str, Any]:
        """The medians and means that are reported."""
        rates = {
            "tokens_per_second": round(statistics.median(self.tokens_per_second), 2),
            "tokens_per_second_runs": [round(value, 2) for value in self.tokens_per_second],
        }
        if not self.steps:
            return rates
        read = weight_bytes * self.steps / self.seconds["verify"]
        return rates | {
            "tokens_per_step": round(self.tokens / self.steps, 4),
            **{f"{phase}_ms_per_step": round(1e3 * s / self.steps, 4) for phase, s in self.seconds.items()},
            "weights_read_gb_per_second": round(read / 1e9, 2),
            "share_of_measured_bandwidth": round(read / read_bytes_per_second, 3),
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


def run(settings: Settings, plan: Plan, out: Path | None, with_peers: bool = False, draft: str | None = None) -> dict[str, Any]:
    """Measures and prints; with `out`, saves the figures there, too."""
    loaded = load(settings)
    prompts = [encode(loaded, prompt) for prompt in plan.prompts]
    peers = Transformers(loaded, settings, draft) if with_peers else None
    contenders: list[DrafterName | PeerName] = [*plan.drafters, *(peers.names if peers else [])]
    tallies = {(t, name): Tally() for t in plan.temperatures for name in contenders}
    with Progress() as progress:
        task = progress.add_task("decoding", total=(plan.repeats + 1) * len(tallies))
        for repeat in range(plan.repeats + 1):
            for (temperature, name), tally in tallies.items():
                chosen = prompts if repeat else prompts[:2]  # the first round only warms up
                started = time.perf_counter()
                if name in PEERS:
                    assert peers is not None
                    timed = [peers.answer(name, p, temperature, plan.max_tokens, plan.seed) for p in chosen]
                    if repeat:
                        tally.add_tokens([tokens for tokens, _ in timed], sum(seconds for _, seconds in timed))
                else:
                    answers = [answer(loaded, settings, cast(DrafterName, name), p, temperature, plan) for p in chosen]
                    if repeat:
                        tally.add(answers, time.perf_counter() - started)
                progress.advance(task)
    size, speed = loaded.runner.weight_bytes, read_bytes_per_second(loaded.runner)
    figures = {
        "model": settings.model.served_name,
        "dtype": str(loaded.runner.cache_shape.dtype),
        "prompts": len(prompts),
        "max_tokens": plan.max_tokens,
        "max_nodes": settings.speculation.max_nodes,
        "peak_memory_mb": peak_memory_mb(),
        "weights_mb": round(size / 1e6, 1),
        "measured_read_gb_per_second": round(speed / 1e9, 2),
        "results": [
            {
                "drafter": name,
                "temperature": t,
                **tally.figures(size, speed),
                "same_tokens_as_first": same(tallies, plan, t, tally),
            }
            for (t, name), tally in tallies.items()
        ],
    }
    show(figures)
    if out:
        report.save(out, figures)
    return figures


def peak_memory_mb() -> int:
    """The most that this process has held: of the GPU's memory where it has one, else of the machine's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() >> 20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def encode(loaded: Runtime, prompt: str) -> Ints:
    """The prompt's token ids, int32 [P]."""
    return np.array(loaded.tokenizer.encode(prompt), np.int32)


def answer(loaded: Runtime, settings: Settings, drafter: DrafterName, prompt: Ints, temperature: float, plan: Plan) -> Decoded:
    """One answer with fresh state, as a request without a session gets it."""
    return finish(begin(loaded, settings, drafter, prompt, temperature, plan))


def begin(
    loaded: Runtime, settings: Settings, drafter: DrafterName, prompt: Ints, temperature: float, plan: Plan
) -> Generation:
    """The same, to be run step by step."""
    verifier = TreeVerifier(loaded.runner, loaded.runner.new_cache())
    params = SamplingParams(temperature=temperature, seed=plan.seed)
    budget = loaded.budget(drafter, settings.speculation.max_nodes)
    options = DecodeOptions(params, plan.max_tokens, loaded.stop_ids, **budget)
    return Generation(verifier, make(drafter, loaded.resources), prompt, options)


def same(tallies: dict[tuple[float, DrafterName | PeerName], Tally], plan: Plan, temperature: float, tally: Tally) -> str:
    """How many answers equal the first drafter's, as "n/m". A peer's sampled answers have other noise."""
    first = tallies[temperature, plan.drafters[0]].answers
    return f"{sum(a == b for a, b in zip(first, tally.answers, strict=True))}/{len(first)}"


def show(figures: dict[str, Any]) -> None:
    """The figures as a table."""
    table = Table("temperature", "drafter", "tokens/s", "tokens/step", "draft ms", "verify ms", "commit ms", "same", "GB/s")
    for row in figures["results"]:
        cells = [str(row["temperature"]), row["drafter"], f"{row['tokens_per_second']:.1f}"]
        if "tokens_per_step" in row:
            phases = (f"{row[f'{phase}_ms_per_step']:.3f}" for phase in ("draft", "verify", "commit"))
            share = f"{row['weights_read_gb_per_second']:.1f} ({100 * row['share_of_measured_bandwidth']:.0f} %)"
            cells += [f"{row['tokens_per_step']:.3f}", *phases, row["same_tokens_as_first"], share]
        else:
            cells += ["", "", "", "", row["same_tokens_as_first"], ""]
        table.add_row(*cells)
    console = Console()
    console.print(table)
    console.print(
        f"Weights {figures['weights_mb']} MB; this machine reads {figures['measured_read_gb_per_second']} GB/s;"
        f" peak memory {figures['peak_memory_mb']} MB."
    )
