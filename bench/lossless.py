"""`outrider verify-lossless`: drafted answers against plain decoding's, and how near a tie it was where they part.

In float32 they never part, except where two tokens are so near that rounding decides. In bfloat16 rounding is coarse: the
margin says whether a divergence is a near-tie or a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.decode import Plan, answer, encode
from drafters.interface import Ints
from drafters.options import DrafterName
from server.settings import Settings
from server.worker.runtime import Runtime, load
from verify.model.batch import ForwardBatch
from verify.sampling import gumbel, warp_logits
from verify.sampling_params import SamplingParams


@dataclass(frozen=True)
class Divergence:
    """Where a drafted answer leaves plain decoding's."""

    drafter: DrafterName
    temperature: float
    prompt: int  # its number
    position: int  # in the answer
    plain: int  # token id
    drafted: int
    margin: float  # score of the plain token over the drafted one's: logits, or log-weights with their noise


def run(settings: Settings, plan: Plan) -> list[Divergence]:
    """Compares every answer of the plan and prints what it finds."""
    loaded = load(settings)
    found: list[Divergence] = []
    compared = 0
    with Progress() as progress:
        task = progress.add_task("comparing", total=len(plan.prompts) * len(plan.temperatures))
        for temperature in plan.temperatures:
            for number, prompt in enumerate(encode(loaded, text) for text in plan.prompts):
                plain = answer(loaded, settings, "none", prompt, temperature, plan).tokens
                for drafter in plan.drafters:
                    drafted = answer(loaded, settings, drafter, prompt, temperature, plan).tokens
                    compared += 1
                    place = first_difference(plain, drafted)
                    if place is not None:
                        params = SamplingParams(temperature=temperature, seed=plan.seed)
                        margin = tie_margin(loaded, prompt, plain, drafted, place, params)
                        tokens = (token_at(plain, place), token_at(drafted, place))
                        found.append(Divergence(drafter, temperature, number, place, *tokens, margin))
                progress.advance(task)
    show(found, compared, str(loaded.runner.cache_shape.dtype).removeprefix("torch."))
    return found


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two answers part; None where they do not."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def token_at(tokens: Sequence[int], place: int) -> int:
    """The token there; -1 where the answer has ended."""
    return tokens[place] if place < len(tokens) else -1


def tie_margin(
    loaded: Runtime, prompt: Ints, plain: Sequence[int], drafted: Sequence[int], place: int, params: SamplingParams
) -> float:
    """How far plain decoding's token stood above the other after the same text, in one forward; NaN where one has none."""
    tokens = (token_at(plain, place), token_at(drafted, place))
    if min(tokens) < 0:
        return float("nan")
    text = torch.tensor([*prompt.tolist(), *plain[:place]])
    logits = loaded.runner.forward(loaded.runner.new_cache(), ForwardBatch.chain(text), logits=False)
    scores = logits[0].float()
    if not params.greedy:
        scores = warp_logits(logits, params)[0] + gumbel(params.seed, [place], logits.shape[-1], logits.device)[0]
    return float(scores[tokens[0]] - scores[tokens[1]])


def show(found: Sequence[Divergence], compared: int, dtype: str) -> None:
    """The verdict in a line, and the divergences in a table."""
    console = Console()
    if found:
        table = Table("drafter", "temperature", "prompt", "position", "plain", "drafted", "margin")
        for each in found:
            place = (str(each.prompt), str(each.position), str(each.plain), str(each.drafted))
            table.add_row(each.drafter, str(each.temperature), *place, f"{each.margin:.6f}")
        console.print(table)
    console.print(f"{compared - len(found)} of {compared} drafted answers equal plain decoding's ({dtype}).")
