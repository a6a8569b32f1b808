"""vLLM with four requests at once: are greedy answers those of vLLM alone, how many drafts are accepted, what is left behind?

    python -m bench.live.vllm_together --vllm PYTHON --prompts question.jsonl --out FILE

This program starts itself again with the Python of an environment that has vLLM and the drafters. The model is SmolLM2.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLIENTS, TOKENS, CONTEXT_TOKENS = 4, 96, 1024
DRAFTS = {"method": "custom_class", "model": "outrider.engines.vllm.Proposer", "num_speculative_tokens": 8}
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
METHODS: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": NGRAM, "outrider": DRAFTS}


def measure(folder: str, prompts: list[list[int]], method: str) -> dict[str, Any]:
    """Answers all prompts, CLIENTS at a time, in vLLM's process; run with the Python of its environment."""
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {"model": folder, "dtype": "float32", "max_model_len": CONTEXT_TOKENS, "max_num_seqs": CLIENTS}
    options |= {"enforce_eager": True}  # which compiles nothing, and so starts in seconds
    llm = LLM(**options, speculative_config=METHODS[method], enable_prefix_caching=False, disable_log_stats=False)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    llm.generate([{"prompt_token_ids": prompts[0][:8]}], SamplingParams(temperature=0.0, max_tokens=4))
    started = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    found: dict[str, Any] = {"seconds": round(time.perf_counter() - started, 2)}
    found["answers"] = [list(each.outputs[0].token_ids) for each in outputs]
    counters = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        found[name] = counters.get(f"vllm:spec_decode_{name}")
    if method == "outrider":
        drafter = llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter
        # One more request, so that the step after the last answers is seen.
        llm.generate([{"prompt_token_ids": prompts[0]}], SamplingParams(temperature=0.0, max_tokens=3))
        found["sessions_left"] = len(drafter._sessions)
        found["learned_texts"] = len(drafter._learned._texts)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vllm", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    from bench import report
    from bench.live.questions import Renderer, read_tasks
    from bench.model import gguf_file
    from outrider.models import smollm2

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        gguf_file.unpack(smollm2.locate(), folder, "float32")
        renderer = Renderer(str(folder), CONTEXT_TOKENS, TOKENS)
        texts = read_tasks(given.prompts).values()
        prompts = [question.ids.tolist() for task in texts for question in renderer.first(task, given.questions, 0.0)]
        found = {method: run(given.vllm, str(folder), prompts, method) for method in METHODS}
    figures: dict[str, Any] = {
        "clients": CLIENTS,
        "requests": len(prompts),
        "max_tokens": TOKENS,
        "dtype": "float32",
        "methods": {},
    }
    plain = found["plain"]["answers"]
    for method, each in found.items():
        answers = each.pop("answers")
        tokens = sum(map(len, answers))
        steps = tokens - (each["num_accepted_tokens"] or 0)  # each step emits one token more than it accepts
        equal = f"{sum(map(list.__eq__, answers, plain))}/{len(plain)}"
        figures["methods"][method] = {"tokens": tokens, "tokens_per_step": round(tokens / steps, 3), "equal": equal, **each}
    report.save(given.out, figures)
    print(json.dumps(figures["methods"], indent=1))


def run(python: str, folder: str, prompts: list[list[int]], method: str) -> dict[str, Any]:
    """`measure` in another environment."""
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [python, "-P", str(Path(__file__)), "--inside"]  # -P: `vllm` is not the module beside this one
    with tempfile.NamedTemporaryFile() as out:
        work = json.dumps({"folder": folder, "prompts": prompts, "method": method, "out": out.name})
        subprocess.run(command, input=work, text=True, check=True, env=os.environ | environment)
        answer: dict[str, Any] = json.loads(Path(out.name).read_text())
        return answer


if __name__ == "__main__":
    if sys.argv[1:] == ["--inside"]:
        given = json.load(sys.stdin)
        Path(given.pop("out")).write_text(json.dumps(measure(**given)))
    else:
        main()
