"""`python -m bench.model.rules`: how many of a draft model's samples each acceptance rule accepts.

A draft model samples a chain of tokens; a sample is judged if the target has emitted the tokens before it. `keyed` accepts the
samples that equal the target's own choice, `rejection` accepts a sample x with probability min(1, p(x) / q(x)).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bench import report
from bench.decode import encode
from bench.plan import PROMPTS, Plan, make_plan
from outrider import models
from outrider.drafters.interface import Drafter, DraftTree, Source
from outrider.drafters.options import DrafterName, DraftOptions, FusionOptions, PearlOptions
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.registry import make
from outrider.server.settings import Settings, load_settings
from outrider.server.worker.runtime import load
from outrider.verify.decode import decode
from outrider.verify.generation import DecodeOptions, Step
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import TreeVerifier

Rule = Literal["keyed", "rejection"]
# Under `keyed`, the source of a node that a table and the model propose does not tell which of them was right.
CASES: tuple[tuple[DrafterName, Rule], ...] = (
    ("draft", "keyed"),
    ("draft", "rejection"),
    ("pearl", "keyed"),
    ("pearl", "rejection"),
    ("fusion", "rejection"),
)
NODES = 24
CHAIN = DraftOptions(gamma=10, theta_prob=0.0, thrifty=False)  # drafts in every step, however unlikely its tokens
WINDOW = PearlOptions(thrifty=False, window=4)
BEFORE = FusionOptions(draft="before")  # in every step, as CHAIN


def judged(tree: DraftTree, tokens: Collection[int]) -> list[bool]:
    """Whether each first sample along a step's emitted tokens was accepted; ends with the first that was not."""
    found: list[bool] = []
    node: int | None = -1
    for token in tokens:
        draws = None if node is None else tree.draws.get(node)
        if draws is None:
            children = [row for row in range(len(tree)) if tree.parents[row] == node and tree.source[row] == Source.DRAFT]
            if tree.draws or not children:
                break
            sample = children[0]
        else:
            sample = draws.rows[0]
        found.append(token == tree.tokens[sample])
        if not found[-1]:
            break
        node = sample
    return found


def counts(drafter: Drafter, steps: Collection[Step]) -> tuple[int, int]:
    """The numbers of judged and of accepted samples of an answer."""
    if isinstance(drafter, PearlDrafter):  # judges a sample beyond the tree, too
        return drafter.accepted_tokens + drafter.rejections, drafter.accepted_tokens
    samples = [sample for step in steps if step.tree is not None for sample in judged(step.tree, step.tokens)]
    return len(samples), sum(samples)


def run(settings: Settings, plan: Plan, out: Path | None) -> list[dict[str, Any]]:
    """Measures all cases; prints, and saves the figures if `out` is given."""
    runtime = load(settings)
    resources = replace(runtime.resources, options=replace(runtime.resources.options, draft=CHAIN, pearl=WINDOW, fusion=BEFORE))
    rows: list[dict[str, Any]] = []
    for temperature in plan.temperatures:
        for name, rule in CASES:
            tested = accepted = tokens = steps = 0
            started = time.perf_counter()
            for seed, prompt in enumerate(plan.prompts):
                drafter = make(name, resources)
                params = SamplingParams(temperature=temperature, seed=seed, rule=rule)
                options = DecodeOptions(params, plan.max_tokens, runtime.stop_ids, NODES)
                verifier = TreeVerifier(runtime.runner, runtime.runner.new_cache())
                answer = decode(verifier, drafter, encode(runtime, prompt), options)
                samples = counts(drafter, answer.steps)
                tested, accepted = tested + samples[0], accepted + samples[1]
                tokens, steps = tokens + len(answer.tokens), steps + len(answer.steps)
            row = {"temperature": temperature, "drafter": name, "rule": rule, "samples": tested}
            row |= {"acceptance": round(accepted / tested, 4), "tokens_per_step": round(tokens / steps, 4)}
            rows.append(row | {"tokens_per_second": round(tokens / (time.perf_counter() - started), 1)})
    columns = ("temperature", "drafter", "rule", "samples", "accept.", "tokens\nper step", "tokens\nper second")
    legend = "samples: those that were judged; accept.: share of them that was accepted."
    report.print_table("Acceptance of samples", columns, [tuple(row.values()) for row in rows], legend)
    if out:
        report.save(out, {"prompts": len(plan.prompts), "max_tokens": plan.max_tokens, "results": rows})
    return rows


def main(
    prompts: Annotated[Path, typer.Option(help="Prompts, .jsonl or .jsonl.gz.")] = PROMPTS,
    limit: int = 16,
    max_tokens: int = 128,
    temperature: str = "0.8",
    out: Annotated[Path | None, typer.Option(help="Save the figures here.")] = None,
) -> None:
    """Acceptance of the embedded draft model's samples, by drafter and rule."""
    pair = {"model.dtype": "float32", "draft_model.dtype": "float32", "draft_model.path": str(models.DRAFT)}
    plan = make_plan("draft", prompts, limit, temperature, max_tokens, repeats=1)
    run(load_settings(None, {**pair, "model.threads": 1}), plan, out)


if __name__ == "__main__":
    typer.run(main)
