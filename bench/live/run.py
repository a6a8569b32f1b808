"""`outrider bench live`: a live model on the tasks of Spec-Bench, beside other programs, question by question in turns."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import Progress
from transformers import AutoConfig

from bench import report
from bench.live import figures as summaries
from bench.live import tables
from bench.live.hugging_face import TransformersChat
from bench.live.llama import LlamaChat
from bench.live.outrider import OutriderChat
from bench.live.questions import Renderer, parse_tasks, read_tasks
from bench.live.setup import LivePeer, Setup
from bench.live.vllm import VllmChat
from bench.peers.peer import Answer, Question, install_command
from bench.peers.run import installed_version
from bench.peers.turns import Contender, take_turns
from bench.plan import BenchError
from outrider.server.settings import Settings, load_settings, parse_flags

PEERS: Mapping[str, type[LivePeer]] = {"transformers": TransformersChat, "llama.cpp": LlamaChat, "vllm": VllmChat}
VERSIONS = ("xllamacpp", "gguf")
ALL = "all"  # the summary of every task


@dataclass(frozen=True)
class Choice:
    """What is measured."""

    prompts: Path
    questions: int  # per task
    drafters: Sequence[str]
    temperatures: Sequence[float]
    max_tokens: int
    peers: Sequence[str]  # names in PEERS
    only: str  # names of tasks; empty measures all
    gguf: Path | None
    gguf_type: str
    vllm: str
    learn: bool


def parse_peers(text: str) -> list[str]:
    """Comma-separated names of peers; none for an empty text. Raises BenchError."""
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in PEERS]:
        raise BenchError(f"There is no peer {', '.join(unknown)}; choose from {', '.join(PEERS)}.")
    return [name for name in PEERS if name in names]


def run(config: Path | None, flags: Sequence[str], choice: Choice, out: Path | None) -> dict[str, Any]:
    """Measures task by task, saves after each one if `out` is given, and prints. Raises BenchError.

    Tasks that the file already holds are kept, except those that are measured again.
    """
    tasks = read_tasks(choice.prompts)
    chosen = parse_tasks(choice.only, list(tasks))
    skipped = {name: sentence for name in choice.peers if (sentence := why_skipped(name, choice.vllm))}
    with tempfile.TemporaryDirectory(prefix="outrider-live-") as folder, ExitStack() as stack, Progress() as progress:
        setup = make_setup(config, flags, choice, Path(folder))
        renderer = Renderer(setup.settings.model.path, setup.context_tokens, choice.max_tokens)
        peers: list[LivePeer] = [OutriderChat(setup, stack)]
        peers += [PEERS[name](setup, stack) for name in choice.peers if name not in skipped]
        found = describe(setup, choice, skipped, read_parts(out))
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


def why_skipped(name: str, vllm: str) -> str | None:
    """The sentence that says what a peer misses, or None."""
    if name != "vllm":
        command = install_command(PEERS[name].packages)
        return f"{name} is skipped because it is not installed; {command} installs it." if command else None
    asked = [vllm, "-c", "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"]
    try:
        missing = subprocess.run(asked, capture_output=True, check=False).returncode != 0
    except OSError:
        missing = True
    sentence = f"vllm is skipped because {vllm} cannot import it; give the Python of an environment that has vLLM with --vllm."
    return sentence if missing else None


def make_setup(config: Path | None, flags: Sequence[str], choice: Choice, folder: Path) -> Setup:
    """What the contenders share. Raises SettingsError."""
    given = load_settings(config, parse_flags(flags))
    threads = given.model.threads or os.cpu_count() or 1
    common = [*([] if config is None else ["--config", str(config)]), *flags]
    common += ["--model.device", "cpu", "--model.threads", str(threads)]
    context = given.model.context_tokens or context_of(given)
    return Setup(
        settings=given,
        flags=common,
        drafters=choice.drafters,
        temperatures=choice.temperatures,
        threads=threads,
        context_tokens=context,
        folder=folder,
        gguf=choice.gguf,
        gguf_type=choice.gguf_type,
        vllm=choice.vllm,
        learn=choice.learn,
    )


def context_of(settings: Settings) -> int:
    """The model's context in tokens."""
    path = Path(settings.model.path)
    place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    config = AutoConfig.from_pretrained(**place if path.suffix == ".gguf" else {"pretrained_model_name_or_path": str(path)})
    return int(config.max_position_embeddings)


def measure(peers: Sequence[LivePeer], questions: Sequence[Question], advance: Callable[[], None]) -> dict[str, Any]:
    """Every contender's answers to all questions but the last, which warms up."""
    contenders: dict[Contender, Callable[[Question], Answer]] = {
        Contender(peer.name, method, peer.transport): partial(peer.answer, method) for peer in peers for method in peer.methods
    }
    *measured, warm_up = questions
    tallies = take_turns(contenders, measured, 1, advance, [warm_up])
    return {"commit": report.commit(), "machine": report.machine(), "rows": summaries.record(tallies, measured)}


def read_parts(out: Path | None) -> list[dict[str, Any]]:
    """The parts that a file holds; none if there is no file. Raises BenchError."""
    if out is None or not out.exists():
        return []
    try:
        return list(json.loads(out.read_text())["parts"])
    except (ValueError, KeyError, TypeError):
        raise BenchError(f"{out} holds no results of this benchmark; give another file with --out.") from None


def describe(setup: Setup, choice: Choice, skipped: Mapping[str, str], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What is measured, with the parts so far."""
    model = setup.settings.model
    return {
        "model": model.served_name,
        "dtype": model.dtype,
        "quantize": model.quantize,
        "gguf": setup.gguf.name if setup.gguf else None,
        "gguf_type": setup.gguf_type or None,
        "threads": setup.threads,
        "max_tokens": choice.max_tokens,
        "learn": setup.learn,
        "versions": {name: installed_version(name) for name in VERSIONS},
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
            rows = summaries.figures(summaries.pool(members))
            questions = sum(len(each["rows"][0]["tokens"]) for each in members)
            found["summary"].append({"task": task, "temperature": temperature, "questions": questions, "rows": rows})
