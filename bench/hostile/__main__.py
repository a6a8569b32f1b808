"""`python -m bench.hostile`: starts a server, attacks it, and names the criteria that it failed."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.progress import Progress

from bench import report
from bench.hostile.attack import Attack, bystanders_body
from bench.hostile.folder import FolderTrouble
from bench.hostile.prober import probing
from bench.hostile.target import Target, survey
from bench.hostile.verdict import Outcome, failed_criteria, growth
from bench.http.client import metric, new_client, quantiles
from bench.http.process import ServerProcess, start_server
from outrider.server.settings import load_settings

CONFIG = Path(__file__).parents[1] / "hostile.yaml"
LONG_TEXT = "".join(f"value_{number} = compute({number})\n" for number in range(40))
BYSTANDERS_PROMPTS = ("def f(", "def read_file(path):", LONG_TEXT + "def g(", LONG_TEXT * 2 + "def h(")
RECOVERY_SECONDS = 120.0  # for the right answer afterwards: a killed worker may still be loading


def main(
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 20_000,
    kills: Annotated[int, typer.Option(help="How often the worker is killed, in the first 30 percent.", min=0)] = 6,
    seed: Annotated[int, typer.Option(help="Seed of the random requests.")] = 0,
    config: Annotated[Path, typer.Option(help="Settings of the server; one of the keys is the bystander's.")] = CONFIG,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "hostile.json",
) -> None:
    """Start a server and attack it. Exit code 1 if it fails a criterion."""
    settings = load_settings(config, {})
    with tempfile.TemporaryDirectory(prefix="outrider-hostile-") as folder, ExitStack() as stack:
        flags = ["--config", str(config), "--sessions.folder", folder]
        server, other = (stack.enter_context(start_server(flags)) for _ in range(2))
        target = asyncio.run(survey(server.url, settings))
        expected = asyncio.run(right_answer(target))
        answers = {prompt: asyncio.run(right_answer(target, prompt)) for prompt in BYSTANDERS_PROMPTS}
        trouble = FolderTrouble(Path(folder), [server.process.pid, other.process.pid], seed)
        attack = Attack(target, server, requests, kills, seed, answers, [other.url], trouble)
        started = time.perf_counter()
        with probing(server.url) as health, Progress() as progress:
            task = progress.add_task("attacking", total=requests)
            asyncio.run(attack.run(lambda: progress.advance(task)))
        seconds = time.perf_counter() - started
        outcome = judge(attack, server, target, expected, health)
    failed = failed_criteria(outcome)
    figures = {
        "requests": requests,
        "seconds": round(seconds),
        **attack.record.figures(),
        "folder": dict(trouble.counts),
        "health_ms": outcome.health_ms,
        "memory": {name: growth(samples) for name, samples in outcome.memory_mb.items()},
        "failed": failed,
    }
    Console().print(figures)
    report.save(out, figures)
    for sentence in failed:
        print(f"failed: {sentence}", file=sys.stderr)
    if failed:
        raise typer.Exit(1)


def judge(attack: Attack, server: ServerProcess, target: Target, expected: str, health: dict[str, Any]) -> Outcome:
    """The outcome, once the attack is over."""
    exit_code = server.process.poll()
    alive = exit_code is None
    return Outcome(
        bad=attack.record.bad,
        front_end_exit=exit_code,
        kills=attack.record.kills,
        right_afterwards=alive and asyncio.run(recovers(target, expected)),
        worker_restarts=asyncio.run(restarts(target)) if alive else attack.record.kills,
        health_ms=quantiles(health["seconds"]),
        health_failures=health["failures"],
        memory_mb=attack.record.memory,
    )


async def right_answer(target: Target, prompt: str = "def read_file(path):") -> str:
    """The text of a greedy answer without drafts and without a session that is kept; the error if there is none."""
    body = bystanders_body(target.model, prompt) | {"session_id": None, "speculation": {"drafter": "none"}}
    async with new_client(target.url) as client:
        headers = {"Authorization": f"Bearer {target.bystanders_key}"}
        response = await client.post("/v1/completions", json=body, headers=headers)
    return str(response.json()["choices"][0]["text"]) if response.status_code == 200 else response.text


async def recovers(target: Target, expected: str) -> bool:
    """Whether the server gives the expected answer within RECOVERY_SECONDS."""
    deadline = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < deadline:
        try:
            if await right_answer(target) == expected:
                return True
        except httpx.HTTPError:
            pass
        await asyncio.sleep(1.0)
    return False


async def restarts(target: Target) -> float:
    """How often the server has replaced its worker."""
    async with new_client(target.url) as client:
        client.headers["Authorization"] = f"Bearer {target.bystanders_key}"
        return await metric(client, "outrider_worker_restarts_total")


if __name__ == "__main__":
    typer.run(main)
