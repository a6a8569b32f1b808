"""`python -m bench.sources`: what each source of `fusion` is worth on a live model, over the six tasks of Spec-Bench.

Every variant of the drafter answers the same questions, each in a session of its own, with a fixed number of draft nodes per
step. Only tokens per step and equality are reported, which depend on no clock, so other programs may run beside it. The results
are saved after each variant.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import report
from bench.live.questions import Renderer, read_tasks
from bench.live.setup import Question
from bench.others.drafters import TokenRecycling
from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import NOTHING, Drafter, Ints, Sampling
from outrider.drafters.options import FusionOptions
from outrider.drafters.registry import Resources, make
from outrider.drafters.sequence import Sequence as Text
from outrider.models import smollm2
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.decode import Decoded, decode
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier

NewDrafter = Callable[[Resources], Drafter]
# A session's text cannot be left out entirely.
FEW_TOKENS = 64
ALL = "all sources"


class WithoutDice(FusionDrafter):
    """Is not told how the target samples."""

    def begin(self, sequence: Text, prediction: Ints = NOTHING, sampling: Sampling | None = None) -> None:
        super().begin(sequence, prediction)


def fusion(kind: type[FusionDrafter] = FusionDrafter, **changes: Any) -> NewDrafter:
    """A variant of `fusion`."""
    options = replace(FusionOptions(), **changes)
    return lambda resources: kind(resources.base, resources.corpus, options, resources.vocabulary)


VARIANTS: Mapping[str, NewDrafter] = {
    ALL: fusion(),
    "without the dice": fusion(WithoutDice),
    "without feedback": fusion(feedback=0),
    "without the text": fusion(capacity=FEW_TOKENS),
    "`trigram`": lambda resources: make("trigram", resources),
    "`lookup`": lambda resources: make("lookup", resources),
    "Token Recycling": lambda resources: TokenRecycling(),
}


@dataclass(frozen=True)
class Answer:
    """An answer of one drafter."""

    task: str
    tokens: list[int]
    steps: int


def main(
    prompts: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl.")],
    questions: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 4,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8,1",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 128,
    nodes: Annotated[int, typer.Option(min=1, help="Draft nodes of a step.")] = 8,
    dtype: Annotated[str, typer.Option(help="Data type of the model.")] = "float32",
    only: Annotated[str, typer.Option(help="Variants, separated by commas; default: all.")] = "",
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "sources-smollm2.json",
) -> None:
    """Compare the variants of `fusion` on SmolLM2."""
    runtime = load(load_settings(None, {"model.path": smollm2.NAME, "model.dtype": dtype}))
    renderer = Renderer(str(smollm2.locate()), runtime.runner.context_tokens, tokens)
    chosen = [name.strip() for name in only.split(",")] if only else list(VARIANTS)
    if unknown := [name for name in chosen if name not in VARIANTS]:
        raise typer.BadParameter(f"there is no variant {', '.join(unknown)}; choose from {', '.join(VARIANTS)}.")
    asked = {
        float(each): {task: renderer.first(texts, questions, float(each)) for task, texts in read_tasks(prompts).items()}
        for each in temperature.split(",")
    }
    rows: list[dict[str, Any]] = []
    for value, tasks in asked.items():
        plain = answers(runtime, lambda resources: make("none", resources), tasks, nodes)
        for name in chosen:
            rows.append(
                {"temperature": value, "variant": name, **figures(answers(runtime, VARIANTS[name], tasks, nodes), plain)}
            )
            report.save(out, {"model": smollm2.NAME, "dtype": dtype, "questions": questions, "nodes": nodes, "rows": rows})
    show(rows)


def answers(runtime: Runtime, new: NewDrafter, tasks: Mapping[str, Sequence[Question]], nodes: int) -> list[Answer]:
    """The answers to all questions, each in a session of its own."""
    found = []
    for task, questions in tasks.items():
        for seed, question in enumerate(questions):
            decoded = answer(runtime, new(runtime.resources), question, seed, nodes)
            found.append(Answer(task, decoded.tokens, len(decoded.steps)))
    return found


def answer(runtime: Runtime, drafter: Drafter, question: Question, seed: int, nodes: int) -> Decoded:
    """The answer to a question."""
    verifier = Verifier(runtime.runner, runtime.runner.new_cache())
    params = SamplingParams(temperature=question.temperature, seed=seed)
    return decode(verifier, drafter, question.ids, DecodeOptions(params, question.max_tokens, runtime.stop_ids, nodes))


def figures(found: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """Tokens per step over all answers and by task, and how many answers are those of plain decoding."""
    tasks = dict.fromkeys(each.task for each in found)
    by_task = {task: per_step([each for each in found if each.task == task]) for task in tasks}
    return {
        "tokens_per_step": per_step(found),
        "mean_of_tasks": round(statistics.mean(by_task.values()), 4),
        "by_task": by_task,
        "same_as_plain": sum(one.tokens == other.tokens for one, other in zip(found, plain, strict=True)),
        "answers": len(found),
    }


def per_step(found: Sequence[Answer]) -> float:
    """Tokens per step."""
    return round(sum(len(each.tokens) for each in found) / sum(each.steps for each in found), 4)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the table."""
    columns = {"temperature": "temperature", "variant": "variant", "tokens\nper step": "tokens_per_step:.3f"}
    shown = [{**row, "equal": f"{row['same_as_plain']}/{row['answers']}", **row["by_task"]} for row in rows]
    tasks = {task: f"{task}:.3f" for task in rows[0]["by_task"]}
    report.print_figures("Sources of fusion", {**columns, **tasks, "equal": "equal"}, shown)


if __name__ == "__main__":
    typer.run(main)
