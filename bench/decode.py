"""`outrider bench decode`: tokens per second and per step, in process; drafters take turns on the same prompts."""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench import report
from bench.plan import Plan
from bench.record import Record, Row, digest
from outrider.drafters.interface import Ints
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import make
from outrider.server.settings import Settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.decode import Decoded, finish
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

KEY = ("repeat", "prompt", "temperature", "drafter")
PHASES = ("draft", "verify", "commit")


def run(settings: Settings, plan: Plan, out: Path | None) -> dict[str, Any]:
    """Measures, prints, and saves each answer if `out` is given; a file of the same run goes on. Raises BenchError."""
    runtime = load(settings)
    record = Record(out, describe(runtime, settings, plan), KEY)
    prompts = [encode(runtime, prompt) for prompt in plan.prompts]
    cases = list(product(range(plan.repeats), range(len(prompts)), plan.temperatures, plan.drafters))
    for name in plan.drafters:  # the first answer is slower
        answer(runtime, settings, name, prompts[0], plan.temperatures[0], plan)
    for case in track(cases, "decoding"):
        place = dict(zip(KEY, case, strict=True))
        if not record.has(place):
            _, number, temperature, name = case
            started = time.perf_counter()
            decoded = answer(runtime, settings, name, prompts[number], temperature, plan)
            record.add(place, figures_of(decoded, time.perf_counter() - started))
    found = {"results": list(results(record.answers))}
    record.save(found)
    show(found["results"])
    return found


def describe(runtime: Runtime, settings: Settings, plan: Plan) -> dict[str, Any]:
    return {
        "model": settings.model.served_name,
        "draft_model": Path(settings.draft_model.path).name if settings.draft_model.path else None,
        "dtype": runtime.runner.dtypes[0],
        "weight_bits": runtime.runner.weight_bits,
        "kv_dtype": runtime.runner.dtypes[1],
        "max_tokens": plan.max_tokens,
        "max_nodes": settings.speculation.max_nodes,
        "weights_mb": round(runtime.runner.weight_bytes / 1e6, 1),
    }


def figures_of(decoded: Decoded, seconds: float) -> Row:
    row: Row = {"tokens": len(decoded.tokens), "steps": len(decoded.steps), "seconds": round(seconds, 4)}
    row |= {f"{phase}_seconds": round(sum(getattr(step, f"{phase}_seconds") for step in decoded.steps), 4) for phase in PHASES}
    return row | {"text": digest(str(decoded.tokens))}


def results(answers: Sequence[Row]) -> Iterator[Row]:
    """The figures of each drafter at each temperature."""
    groups: dict[tuple[float, str], list[Row]] = {}
    for row in answers:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    first = answers[0]["drafter"]
    for (temperature, drafter), rows in sorted(groups.items(), key=lambda group: group[0][0]):
        repeats = [[row for row in rows if row["repeat"] == repeat] for repeat in {row["repeat"] for row in rows}]
        rates = [sum(row["tokens"] for row in part) / sum(row["seconds"] for row in part) for part in repeats]
        steps = sum(row["steps"] for row in rows)
        expected = {(row["repeat"], row["prompt"]): row["text"] for row in groups[temperature, first]}
        equal = sum(expected.get((row["repeat"], row["prompt"])) == row["text"] for row in rows)
        yield {
            "drafter": drafter,
            "temperature": temperature,
            "tokens_per_second": round(statistics.median(rates), 2),
            "tokens_per_second_runs": [round(rate, 2) for rate in rates],
            "tokens_per_step": round(sum(row["tokens"] for row in rows) / steps, 4),
            **{f"{name}_ms_per_step": round(1e3 * sum(row[f"{name}_seconds"] for row in rows) / steps, 4) for name in PHASES},
            "same_tokens_as_first": f"{equal}/{len(rows)}",
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


def show(rows: Sequence[Row]) -> None:
    """Prints two tables: speed, and where a step's time goes."""
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
        {"temp.": "temperature", "drafter": "drafter", **{f"{phase}\nms": f"{phase}_ms_per_step:.3f" for phase in PHASES}},
        rows,
    )
