"""`outrider verify-lossless`: compares drafted answers with plain decoding, and measures the margin where they differ.

In float32 they are equal unless rounding decides between two nearly equal scores. In bfloat16 rounding is coarse: the margin
distinguishes a near-tie from a bug.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.decode import answer, encode
from bench.plan import Plan
from outrider.drafters.interface import Ints
from outrider.server.settings import Settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.sampling.device import warp_logits
from outrider.verify.sampling.sampler import gumbel
from outrider.verify.sampling_params import SamplingParams


def run(settings: Settings, plan: Plan) -> list[dict[str, Any]]:
    """Compares every answer of the plan; prints and returns the first differences."""
    runtime = load(settings)
    divergences: list[dict[str, Any]] = []
    prompts = [encode(runtime, text) for text in plan.prompts]
    with Progress() as progress:
        task = progress.add_task("comparing", total=len(prompts) * len(plan.temperatures))
        for temperature in plan.temperatures:
            for number, prompt in enumerate(prompts):
                plain = answer(runtime, settings, "none", prompt, temperature, plan).tokens
                for drafter in plan.drafters:
                    drafted = answer(runtime, settings, drafter, prompt, temperature, plan).tokens
                    position = first_difference(plain, drafted)
                    if position is not None:
                        params = SamplingParams(temperature=temperature, seed=plan.seed)
                        margin = tie_margin(runtime, prompt, plain, drafted, position, params)
                        tokens = {"plain": token_at(plain, position), "drafted": token_at(drafted, position)}
                        place = {"drafter": drafter, "temperature": temperature, "prompt": number, "position": position}
                        divergences.append({**place, **tokens, "margin": margin})
                progress.advance(task)
    compared = len(prompts) * len(plan.temperatures) * len(plan.drafters)
    show(divergences, compared, runtime.runner.dtypes[0], runtime.runner.invariance)
    return divergences


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first position where two answers differ; None if they are equal."""
    for position, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return position
    return None if len(left) == len(right) else min(len(left), len(right))


def token_at(tokens: Sequence[int], position: int) -> int:
    """The token at `position`, or -1 after the end."""
    return tokens[position] if position < len(tokens) else -1


def tie_margin(
    runtime: Runtime, prompt: Ints, plain: Sequence[int], drafted: Sequence[int], position: int, params: SamplingParams
) -> float:
    """The plain token's score minus the drafted one's, from one forward; NaN if an answer has ended."""
    tokens = (token_at(plain, position), token_at(drafted, position))
    if min(tokens) < 0:
        return float("nan")
    text = torch.tensor([*prompt.tolist(), *plain[:position]])
    logits = torch.as_tensor(runtime.runner.forward(runtime.runner.new_cache(), ForwardBatch.chain(text), logits=False))
    scores = logits[0].float()
    if not params.greedy:
        noise = gumbel(params.for_prompt(len(prompt)).seed, position, np.arange(logits.shape[-1]))
        scores = warp_logits(logits, params)[0] + torch.from_numpy(noise).to(scores.device)
    return float(scores[tokens[0]] - scores[tokens[1]])


def show(divergences: Sequence[Mapping[str, Any]], compared: int, dtype: str, invariance: str) -> None:
    """Prints a table of the divergences, if any, and their number."""
    if divergences:
        columns = {"drafter": "drafter", "temp.": "temperature", "prompt": "prompt", "position": "position"}
        columns |= {"plain\ntoken": "plain", "drafted\ntoken": "drafted", "margin": "margin:.6f"}
        legend = (
            "prompt: index from 0; position: in the answer; token: id, -1 after the end; margin: the plain token's score minus"
            " the drafted one's, near 0 where rounding decided, larger where there is a bug."
        )
        report.print_figures("Divergences", columns, divergences, legend)
    Console(highlight=False).print(
        f"{compared - len(divergences)} of {compared} drafted answers equal plain decoding's ({dtype}).\n"
        f"Invariant rows: {invariance}."
    )
