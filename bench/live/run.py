"""`outrider bench live`: a live model on the tasks of Spec-Bench, beside other programs, question by question in turns."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import AutoConfig

from bench import report
from bench.live import tables
from bench.live.figures import figures, pool, record
from bench.live.hugging_face import TransformersChat
from bench.live.llama_python import LlamaPython
from bench.live.outrider import OutriderChat
from bench.live.questions import Renderer, parse_tasks, read_tasks
from bench.live.setup import Choice, LivePeer, Question, Setup
from bench.live.turns import contenders, install_command, take_turns
from bench.plan import BenchError
from outrider.server.settings import Settings, load_settings, parse_flags
from outrider.verify.gguf.metadata import read_metadata

PEERS: Mapping[str, type[LivePeer]] = {
    "transformers": TransformersChat,
    "llama-cpp-python": LlamaPython,
}
VERSIONS = ("llama_cpp_python", "gguf")
ALL = "all"  # the summary of every task


def run(config: Path | None, flags: Sequence[str], choice: Choice, out: Path | None) -> dict[str, Any]:
    """Measures task by task, saves after each one if `out` is given, and prints. Raises BenchError.

    Tasks that the file already holds are kept, except those that are measured again.
    """
    tasks = read_tasks(choice.prompts)
    chosen = parse_tasks(choice.only, list(tasks))
    skipped = {name: sentence for name in choice.peers if (sentence := why_skipped(name))}
    with tempfile.TemporaryDirectory(prefix="outrider-live-") as folder, ExitStack() as stack, Progress() as progress:
        setup = make_setup(config, flags, choice, Path(folder))
        renderer = Renderer(setup.settings.model.path, setup.context_tokens, choice.max_tokens)
        peers: list[LivePeer] = [OutriderChat(setup, stack)]
        peers += [PEERS[name](setup, stack) for name in choice.peers if name not in skipped]
        found = describe(setup, skipped, read_parts(out))
        steps = progress.add_task("answering", total=len(chosen) * len(choice.temperatures) * (choice.questions + 1))
        for task in chosen:
            for temperature in choice.temperatures:
                questions = renderer.first(tasks[task], choice.questions + 1, temperature)
                part = measure(peers, questions, partial(progress.advance, steps))
                add_part(found, {"task": task, "temperature": temperature, **part})
                if out:
                    report.save(out, found)
    tables.show(found)
    return found


def why_skipped(name: str) -> str | None:
    """The sentence that says what a peer misses, or None."""
    command = install_command(PEERS[name].packages)
    return f"{name} is skipped because it is not installed; {command} installs it." if command else None


def make_setup(config: Path | None, flags: Sequence[str], choice: Choice, folder: Path) -> Setup:
    """Makes the setup that the contenders share. Raises SettingsError."""
    given = load_settings(config, parse_flags(flags))
    threads = given.model.threads or os.cpu_count() or 1
    common = [*([] if config is None else ["--config", str(config)]), *flags]
    common += ["--model.device", "cpu", "--model.threads", str(threads)]
    return Setup(choice, given, common, threads, given.model.context_tokens or context_of(given), folder)


def context_of(settings: Settings) -> int:
    """The model's context in tokens. Raises ModelError for a damaged GGUF file."""
    path = settings.model.path
    if path.endswith(".gguf"):
        entries = read_metadata(path).entries  # in milliseconds; transformers takes seconds for a large vocabulary
        return int(entries[f"{entries['general.architecture']}.context_length"])
    return int(AutoConfig.from_pretrained(path).max_position_embeddings)


def measure(peers: Sequence[LivePeer], questions: Sequence[Question], advance: Callable[[], None]) -> dict[str, Any]:
    """Every contender's answers to all questions but the last, which warms up."""
    *measured, warm_up = questions
    answers = take_turns(contenders(peers), measured, warm_up, advance)
    rows = record(answers, [len(question.ids) for question in measured])
    return {"commit": report.commit(), "machine": report.machine(), "rows": rows}


def read_parts(out: Path | None) -> list[dict[str, Any]]:
    """The parts that a file holds; none if there is no file. Raises BenchError."""
    if out is None or not out.exists():
        return []
    try:
        return list(json.loads(out.read_text())["parts"])
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{out} holds no results of this benchmark; give another file with --out.") from None


def describe(setup: Setup, skipped: Mapping[str, str], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Describes the measurement, with the parts so far."""
    model = setup.settings.model
    return {
        "model": model.served_name,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "gguf": setup.choice.gguf.name if setup.choice.gguf else None,
        "threads": setup.threads,
        "max_tokens": setup.choice.max_tokens,
        "versions": {name: report.installed_version(name) for name in VERSIONS},
        "skipped": dict(skipped),
        "summary": [],
        "parts": parts,
    }


def add_part(found: dict[str, Any], part: dict[str, Any]) -> None:
    """Adds a part, in place of an earlier one of the same task and temperature, and renews the summary."""
    key = (part["task"], part["temperature"])
    parts = [each for each in found["parts"] if (each["task"], each["temperature"]) != key] + [part]
    found["parts"] = parts
    found["summary"] = []
    for temperature in sorted({each["temperature"] for each in parts}):
        alike = [each for each in parts if each["temperature"] == temperature]
        groups = {each["task"]: [each] for each in alike} | ({ALL: alike} if len(alike) > 1 else {})
        for task, members in groups.items():
            rows = figures(pool(members))
            questions = sum(len(each["rows"][0]["tokens"]) for each in members)
            found["summary"].append({"task": task, "temperature": temperature, "questions": questions, "rows": rows})
