"""The command `outrider pair`: which of the models at hand could draft for a model, and what each would gain on this machine.

The model answers a few questions. What a draft model finds likeliest at each token of an answer takes one forward, and shows
how many tokens each step would emit; with the times of both models' steps, that is the speed of every draft length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from outrider.server.command import EXTRA_FLAGS, ConfigOption, failing

if TYPE_CHECKING:
    from outrider.drafters.interface import Ints
    from outrider.server.settings import Settings
    from outrider.verify.cost import CostCurve
    from outrider.verify.draft_model.runner import DraftRunner
    from outrider.verify.fast_tokenizer import AnyTokenizer
    from outrider.verify.model.runner import ModelRunner

QUESTIONS = (
    "Write a Python function that merges two sorted lists.",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Explain each step.",
)
# A model that takes more than this share of the target's bytes does not pay: its steps take nearly as long.
MOST_SHARE = 0.6
# The most tokens of a draft.
MOST_TOKENS = 16
# Gains below it are within what measurements differ by.
LEAST_GAIN = 1.05


class Gain(NamedTuple):
    """The best draft length, and how much faster than plain decoding it is."""

    tokens: int
    speed: float


@dataclass(frozen=True)
class Answer:
    prompt: Ints  # int32 [P]
    tokens: Ints  # int32 [T]


def register(outrider: typer.Typer) -> None:
    """Adds the command to the `outrider` application."""
    outrider.command("pair", context_settings=EXTRA_FLAGS)(pair)


def pair(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model to draft for: a folder, a GGUF file or a Hugging Face id.")],
    draft: Annotated[
        list[str] | None, typer.Option(help="A model that could draft; may be repeated. Default: smaller ones on this machine.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of each answer.")] = 64,
    config: ConfigOption = None,
) -> None:
    """Find a draft model: what each model at hand would gain as one on this machine. Settings also work as flags."""
    from rich.console import Console
    from rich.table import Table

    from outrider.server.settings import SettingsError, load_settings, parse_flags
    from outrider.verify.errors import ModelError
    from outrider.verify.tokenizer import load_tokenizer

    gains: dict[str, float] = {}
    console, table = Console(highlight=False), Table("draft model", "agrees", "step, ms", "best draft", "speed", box=None)
    with failing(SettingsError, ModelError):
        settings = load_settings(config, {**parse_flags(context.args), "model.path": model})
        tokenizer = load_tokenizer(settings.model.path, settings.model.trust_remote_code, settings.model.revision)
        for candidate, found in measure(settings, tokenizer, draft or [*at_hand(settings)], tokens):
            if isinstance(found, str):
                console.print(f"{candidate}: {found}", soft_wrap=True)
                continue
            agrees, seconds, gain = found
            table.add_row(candidate, f"{agrees:.0%}", f"{1e3 * seconds:.1f}", f"{gain.tokens} tokens", f"{gain.speed:.2f}")
            gains[candidate] = gain.speed
    if not gains:
        console.print(
            "No model on this machine can draft for it; name one with --draft." if not draft else "None can draft for it."
        )
        return
    console.print(table)
    best = max(gains, key=lambda each: gains[each])
    if gains[best] >= LEAST_GAIN:
        console.print(f"Serve the pair with: outrider serve --model {model} --draft-model {best}", soft_wrap=True)
    else:
        console.print("None pays on this machine: a step of each costs more than its tokens save.")


def at_hand(settings: Settings) -> Iterator[str]:
    """Models on this machine that are much smaller than the model of the settings: beside it, and those that `list` shows."""
    from outrider.models.packaged import FOLDER
    from outrider.server.model_commands import cache
    from outrider.server.models.catalog import expand, find_models
    from outrider.server.settings import SettingsError
    from outrider.verify.checkpoint import stored_bytes
    from outrider.verify.errors import ModelError
    from outrider.verify.model_stores import stored_models

    model = Path(settings.model.path).expanduser()
    paths = [entry.path for entry in find_models(settings).values()]
    for folder in (model.parent if model.exists() else FOLDER, FOLDER):
        with suppress(SettingsError):
            paths += expand(str(folder))
    paths += [each.repo_id for each in cache().repos if each.repo_type == "model"]
    for each in stored_models():
        with suppress(ModelError):
            paths.append(each.served_path())
    most = MOST_SHARE * (stored_bytes(settings.model.path) or 0)
    for path in {Path(each).resolve(): each for each in reversed(paths)}.values():  # of two names of one model, the first
        if 0 < (stored_bytes(path) or 0) <= most:
            yield path


def measure(
    settings: Settings, tokenizer: AnyTokenizer, candidates: Sequence[str], tokens: int
) -> Iterator[tuple[str, str | tuple[float, float, Gain]]]:
    """For each candidate why it cannot draft, or its share of equal tokens, the seconds of its step, and the gain."""
    from outrider.server.worker.runtime import cost_folder, load_target, start_models
    from outrider.verify.draft_model.shared_ids import find_differences
    from outrider.verify.errors import ModelError
    from outrider.verify.measurement import load_or_measure
    from outrider.verify.tokenizer import load_tokenizer

    fitting: dict[str, Mapping[int, int]] = {}
    for candidate in candidates:
        try:
            fitting[candidate] = find_differences(tokenizer, load_tokenizer(candidate))
        except ModelError as error:
            yield candidate, str(error)
    if not fitting:
        return
    target = load_target(settings)
    start_models(target, None, settings, tokenizer)
    answers = [answer(target, tokenizer, question, tokens) for question in QUESTIONS]
    curve = load_or_measure(target, cost_folder(settings))
    for candidate, differences in fitting.items():
        try:
            yield candidate, compare(settings, candidate, differences, target, curve, answers)
        except ModelError as error:
            yield candidate, str(error)


def answer(runner: ModelRunner, tokenizer: AnyTokenizer, question: str, tokens: int) -> Answer:
    """The answer to a question, or to its text if the model has no chat template."""
    from outrider.drafters.none import NoDrafter
    from outrider.verify.decode import decode
    from outrider.verify.sampling_params import SamplingParams
    from outrider.verify.stream import DecodeOptions
    from outrider.verify.tokenizer import stop_ids
    from outrider.verify.verifier import Verifier

    text = question
    if tokenizer.chat_template:
        messages: list[Any] = [{"role": "user", "content": question}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    prompt = np.array(tokenizer.encode(text, add_special_tokens=not tokenizer.chat_template), np.int32)
    ends = stop_ids(runner.stop_tokens, tokenizer)
    options = DecodeOptions(SamplingParams(temperature=0), tokens, ends, max_nodes=0)
    found = decode(Verifier(runner, runner.new_cache()), NoDrafter(), prompt, options).tokens
    return Answer(prompt, np.array(found, np.int32))


def compare(
    settings: Settings,
    candidate: str,
    differences: Mapping[int, int],
    target: ModelRunner,
    curve: CostCurve,
    answers: Sequence[Answer],
) -> tuple[float, float, Gain]:
    """The candidate's share of equal tokens, the seconds of its step, and the gain. Raises ModelError."""
    from outrider.server.settings.models import DraftModel
    from outrider.server.worker.runtime import default_threads, shared_options
    from outrider.verify.draft_model.runner import DraftRunner
    from outrider.verify.model import backend

    options = shared_options(settings, DraftModel(path=candidate, quantize=settings.draft_model.quantize))
    runner = backend.load(options)
    runner.threads = default_threads(runner)
    backend.start(runner, candidate, target.context_tokens)
    shared = DraftRunner(runner, target.vocabulary, differences=differences)
    shared.measure(target)
    equal = [agrees(shared, each) for each in answers]
    context = len(answers[0].prompt)
    seconds = shared.pair.forward_seconds(context)
    return float(np.concatenate(equal).mean()), seconds, best_length(equal, curve.at(context), seconds)


def agrees(draft: DraftRunner, answer: Answer) -> NDArray[np.bool_]:
    """Whether a draft model finds each token of an answer the likeliest there: bool [T]."""
    from outrider.verify.model.batch import ForwardBatch
    from outrider.verify.sampling.rows import in_place
    from outrider.verify.verifier import PREFILL_CHUNK_TOKENS

    cache, text = draft.runner.new_cache(), draft.ids.own[np.concatenate([answer.prompt, answer.tokens[:-1]])]
    found: list[NDArray[np.int64]] = []
    for part in np.split(text, range(PREFILL_CHUNK_TOKENS, len(text), PREFILL_CHUNK_TOKENS)):
        logits = draft.runner.forward(cache, ForwardBatch.chain(part))
        found.append(np.asarray(draft.ids.drafted(in_place(logits)).argmax(-1)))
        cache.length += len(part)
    return np.equal(np.concatenate(found)[len(answer.prompt) - 1 :], answer.tokens)


def best_length(equal: Sequence[NDArray[np.bool_]], seconds: NDArray[np.float64], draft_seconds: float) -> Gain:
    """The best length of drafts, given which tokens of each answer a draft would have.

    `seconds` are those of a target's step over 0, 1, ... draft tokens.
    """
    emitted = sum(map(len, equal))
    lengths = range(1, min(MOST_TOKENS + 1, len(seconds)))
    costs = {k: sum(steps(each, k) for each in equal) * (seconds[k] + k * draft_seconds) for k in lengths}
    best = min(costs, key=lambda k: costs[k])
    return Gain(best, float(emitted * seconds[0] / costs[best]))


def steps(equal: NDArray[np.bool_], length: int) -> int:
    """Steps that emit an answer with drafts of this length; each also emits the target's own token."""
    place = count = 0
    while place < len(equal):
        run = equal[place : place + length]
        place += (len(run) if run.all() else int(run.argmin())) + 1
        count += 1
    return count
