"""`python -m bench.corpora`: what corpora that a client posts are worth, and what posting one costs, over HTTP.

The model answers the same prompts without a corpus, with one that holds the text of its answers, with one of other texts,
and with one of both. A hundred files are posted, and posted again after each has changed, while a stream runs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from bench import report
from bench.http.process import start_server
from outrider.models import smollm2

ROOT = Path(__file__).parents[1]
PROMPTS = ROOT / "bench" / "prompts.jsonl"
OTHERS = "docs/*.md"
SOURCES = "server/**/*.py"
FILES = 100
TEMPERATURES = (0.0, 0.8)
STREAM = "Tell a long story about a fox, a bear and a river."
# Sessions would draft from the answers of earlier runs.
FLAGS = ("--model", smollm2.NAME, "--sessions.automatic", "off", "--model.threads", "1")


def main(
    prompts: Annotated[int, typer.Option(help="Prompts of bench/prompts.jsonl.")] = 12,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 128,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "posted-corpora.json",
) -> None:
    """Measure tokens per step with and without corpora, and the time of an update."""
    lines = PROMPTS.read_text().splitlines()[:prompts]
    texts = [json.loads(line)["prompt"] for line in lines]
    with start_server(FLAGS) as server:
        rows = [row for each in TEMPERATURES for row in compare(server.client, texts, tokens, each)]
        updates = measure_updates(server.client)
    columns = {
        "temperature": "temperature",
        "corpus": "corpus",
        "tokens\nper step": "tokens_per_step:.2f",
        "tokens/s": "tokens_per_second:.1f",
    }
    report.print_figures("Corpora", columns, rows)
    print(json.dumps(updates, indent=1))
    report.save(out, {"model": smollm2.NAME, "prompts": len(texts), "tokens": tokens, "runs": rows, "updates": updates})


def compare(client: httpx.Client, prompts: Sequence[str], tokens: int, temperature: float) -> list[dict[str, Any]]:
    """The figures of each corpus at a temperature."""
    plain = [complete(client, prompt, tokens, temperature, None) for prompt in prompts]
    answers = [prompt + answer["choices"][0]["text"] for prompt, answer in zip(prompts, plain, strict=True)]
    others = [path.read_text() for path in sorted(ROOT.glob(OTHERS))]
    corpora = {"its answers": answers, "other texts": others, "both": [*others, *answers]}
    rows = [figures(temperature, "none", plain)]
    for number, (name, texts) in enumerate(corpora.items()):
        post(client, f"corpus-{number}", {f"{index}": text for index, text in enumerate(texts)})
        found = [complete(client, prompt, tokens, temperature, f"corpus-{number}") for prompt in prompts]
        same = sum(one["choices"] == other["choices"] for one, other in zip(found, plain, strict=True))
        rows.append(figures(temperature, name, found) | {"same_answers": same})
        client.delete(f"/v1/outrider/corpora/corpus-{number}").raise_for_status()
    return rows


def complete(client: httpx.Client, prompt: str, tokens: int, temperature: float, corpus: str | None) -> dict[str, Any]:
    """An answer, and the seconds that it took."""
    speculation = {"report": True} | ({} if corpus is None else {"corpus": corpus})
    body = {"model": smollm2.NAME, "prompt": prompt, "max_tokens": tokens, "temperature": temperature, "seed": 1}
    started = time.perf_counter()
    response = client.post("/v1/completions", json={**body, "ignore_eos": True, "speculation": speculation})
    response.raise_for_status()
    return {**response.json(), "seconds": time.perf_counter() - started}


def figures(temperature: float, corpus: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of all answers together."""
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    steps = sum(answer["speculation"]["steps"] for answer in answers)
    seconds = sum(answer["seconds"] for answer in answers)
    return {
        "temperature": temperature,
        "corpus": corpus,
        "tokens_per_step": round(tokens / steps, 3),
        "tokens_per_second": round(tokens / seconds, 1),
    }


def post(client: httpx.Client, name: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """Posts files to a corpus; returns what the server says about it."""
    files = [{"path": path, "text": text} for path, text in texts.items()]
    response = client.post("/v1/outrider/corpora", json={"name": name, "files": files})
    response.raise_for_status()
    return dict(response.json())


def measure_updates(client: httpx.Client) -> dict[str, Any]:
    """The seconds of a first post and of an update, and the gaps between a stream's events without and during an update."""
    paths = sorted(ROOT.glob(SOURCES))[:FILES]
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in paths}
    first = post(client, "many", texts)
    quiet = stream_gaps(client, None)
    changed = {path: f"{text}# changed\n" for path, text in texts.items()}
    during = stream_gaps(client, changed)
    last = {path: f"{text}# again\n" for path, text in changed.items()}
    return {
        "files": len(texts),
        "tokens": first["tokens"],
        "bytes": first["bytes"],
        "first_post_seconds": first["seconds"],
        "update_seconds": post(client, "many", last)["seconds"],
        "unchanged_seconds": post(client, "many", last)["seconds"],
        "stream_gap_ms": report.quantiles(quiet),
        "stream_gap_during_update_ms": report.quantiles(during),
    }


def stream_gaps(client: httpx.Client, update: Mapping[str, str] | None) -> list[float]:
    """The seconds between the events of a stream, in which an update is posted."""
    body = {"model": smollm2.NAME, "prompt": STREAM, "max_tokens": 160, "temperature": 0, "ignore_eos": True, "stream": True}
    gaps, last = list[float](), 0.0
    with ThreadPoolExecutor(1) as pool, client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            elif update is not None:
                pool.submit(post, client, "many", update)
            last = now
    return gaps


if __name__ == "__main__":
    typer.run(main)
