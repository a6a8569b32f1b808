"""The papers' systems with the papers' settings on real models: `python -m bench.papers TARGET DRAFT DATA CORPORA OUT LIMIT`.

PEARL without post-verify drafts beside every second verification, and without pre-verify the first tokens before one.
"""

from __future__ import annotations

import gzip
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from bench.live import COMPLETE, STRIDE
from bench.plan import Plan
from bench.record import Record, Row, digest
from outrider.drafters.interface import DraftTree
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DraftGraphOptions, DraftOptions, DraftTreeOptions, PearlOptions, TrigramOptions
from outrider.drafters.registry import make
from outrider.server.settings import load_settings, parse_flags
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.decode import Decoded, finish
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

WINDOW = 3  # about the measured ratio of the models' speeds
NODES = 64
PAPER: dict[str, Any] = {
    "trigram": TrigramOptions(search="mcts", depth=4),
    "draft": DraftOptions(steps=8, only_if_worth=False),
    "draft_tree": DraftTreeOptions(only_if_worth=False),
    "draft_graph": DraftGraphOptions(only_if_worth=False),
    "pearl": PearlOptions(only_if_worth=False),
}
SYSTEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "ADED, Monte Carlo": ("trigram", {}),
    "ADED, best-first": ("trigram", {"trigram": TrigramOptions()}),
    "REST": ("retrieval", {}),
    "SSD": ("draft", {}),
    "TSD": ("draft-tree", {}),
    "GSD": ("draft-graph", {}),
    "PEARL": ("pearl", {}),
    "PEARL, window 3": ("pearl", {"pearl": PearlOptions(False, WINDOW)}),
    "PEARL without pre-verify": ("", {}),
    "PEARL without post-verify": ("", {}),
}
KEY = ("set", "prompt", "temperature", "system")


class Alternating(UnionDrafter):
    """Drafts beside a verification without drafts alone, and verifies all of that next."""

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        self._time = "before" if len(self._chain) else "during"
        return super().propose(budget, least)


class Sequential(UnionDrafter):
    """Drafts the first tokens before a verification, and the next ones beside it."""

    def propose(self, budget: int, least: float = 0.0) -> DraftTree:
        if not len(self._chain) and self._chain.can_grow:
            while len(self._chain) < WINDOW and self._chain.can_grow:
                self._chain.extend(WINDOW - len(self._chain))
        return super().propose(budget, least)


def answer(runtime: Runtime, system: str, prompt: Any, temperature: float, plan: Plan) -> tuple[Decoded, float]:
    """An answer of a system with fresh state, and its seconds."""
    name, changes = SYSTEMS[system]
    resources = replace(runtime.resources, options=replace(runtime.resources.options, **(PAPER | changes)))
    started = time.perf_counter()
    if name:
        drafter = make(name, resources)
    else:
        assert resources.model is not None
        form, longest = (Sequential, 8) if "pre" in system else (Alternating, 0)
        chain = ModelChain(resources.model(), resources.pair)
        drafter = form(NoDrafter(), chain, resources.pair, longest, "during", only_if_worth=False)
    options = DecodeOptions(
        SamplingParams(temperature=temperature, seed=0), plan.max_tokens, runtime.stop_ids, *runtime.budget(NODES)
    )
    stream = Stream(Verifier(runtime.runner, runtime.runner.new_cache()), drafter, prompt, options)
    decoded = finish(stream)
    return decoded, time.perf_counter() - started


def figures_of(decoded: Decoded, seconds: float) -> Row:
    steps = [step for step in decoded.steps if step.choice is not None]
    return {
        "tokens": len(decoded.tokens),
        "steps": len(decoded.steps),
        "seconds": round(seconds, 4),
        "drafted": sum(len(step.choice.tree) for step in steps if step.choice),
        "accepted": sum(len(step.path) for step in steps),
        "text": digest(str(decoded.tokens)),
    }


def texts(data: Path) -> dict[str, list[str]]:
    """Questions by set."""
    with gzip.open(data / "HumanEval.jsonl.gz", "rt") as file:
        code = [COMPLETE + json.loads(line)["prompt"] for line in file]
    mathematics = [json.loads(line)["question"] for line in (data / "gsm8k-test.jsonl").read_text().splitlines()]
    chats = [json.loads(line) for line in (data / "spec-bench.jsonl").read_text().splitlines()[:80]]
    return {"HumanEval": code, "GSM8K": mathematics, "MT-Bench": [each["turns"][0] for each in chats]}


def main(target: str, draft: str, data: str, corpora: str, out: str, limit: str, *flags: str) -> None:
    plan = Plan(list(SYSTEMS), [], [0.0, 0.8], 64, 1)
    for name, corpus in (("HumanEval", "code"), ("GSM8K", "chat"), ("MT-Bench", "chat")):
        tables = ["--speculation.trigram.table", f"{corpora}/{corpus}.ngram"]
        tables += ["--speculation.retrieval.datastores", f"{corpora}/{corpus}.suffix"]
        settings = load_settings(None, parse_flags(["--model.path", target, "--draft_model.path", draft, *tables, *flags]))
        runtime = load(settings)
        record = Record(Path(out), {"target": Path(target).name, "draft": Path(draft).name, "nodes": NODES}, KEY)
        chosen = texts(Path(data))[name]
        places: list[dict[str, Any]] = [
            {"set": name, "prompt": number, "temperature": temperature, "system": system}
            for number in range(int(limit))
            for temperature in plan.temperatures
            for system in SYSTEMS
        ]
        for place in track(places, name):
            if not record.has(place):
                text = chosen[place["prompt"] * STRIDE]
                messages = [{"role": "user", "content": text}]
                prompt = np.array(runtime.tokenizer.encode(template(messages)), np.int32)
                if len(record.answers) % len(places) == 0:
                    answer(runtime, "none", prompt, 0.0, plan)
                record.add(place, figures_of(*answer(runtime, place["system"], prompt, place["temperature"], plan)))


def template(messages: list[dict[str, str]]) -> str:
    """Qwen's chat format."""
    system = "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
    return system + f"<|im_start|>user\n{messages[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
