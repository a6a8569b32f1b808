"""`python -m tests.soak`: two servers of one folder of sessions answer mixed requests for fifteen minutes.

Beside them, another client attacks, files of sessions are damaged, the disk is full at times, a worker is killed twice and a
server is restarted twice. Only requests that run on a killed worker may fail. Names the criteria that the servers failed.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import report
from bench.http.client import metric, new_client
from outrider.server.settings import load_settings
from tests.soak import memory
from tests.soak.clients import Record, Soak
from tests.soak.folder import FolderTrouble
from tests.soak.intruder import Intruder
from tests.soak.prober import probing
from tests.soak.servers import Servers
from tests.soak.target import survey

CONFIG = Path(__file__).with_name("soak.yaml")
FLAGS = {"scheduling.max_active": "4", "scheduling.max_waiting": "8", "sessions.folder_bytes": "200000000"}
QUESTIONS = 48
LOSS_SECONDS = 5.0  # after a kill, in which its requests fail
LOSS = re.compile(r"estarting it|^\w+Error\b|^  File ")  # lines of the log: a lost worker, and the tracebacks before
MAX_HEALTH_MS = 200.0  # p99


async def attacked(soak: Soak, intruder: Intruder, trouble: FolderTrouble) -> None:
    """Runs all that happens to the servers."""
    await soak.learn()
    async with new_client("") as client:
        disturbing = asyncio.ensure_future(trouble.run())
        try:
            await asyncio.gather(soak.run(), intruder.run(client))
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)


async def worker_restarts(servers: Servers, key: str) -> list[float]:
    """How often each server has replaced its worker."""
    found = []
    for url in servers.urls:
        async with new_client(url) as client:
            client.headers["Authorization"] = f"Bearer {key}"
            found.append(await metric(client, "outrider_worker_restarts_total"))
    return found


def main(
    minutes: Annotated[float, typer.Option(help="Duration.")] = 15.0,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "soak.json",
) -> None:
    """Start the servers and run the soak test. Exit code 1 if they fail a criterion."""
    settings = load_settings(CONFIG, FLAGS)
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as folder:
        given = {"config": str(CONFIG), "sessions.folder": folder, **FLAGS}
        with closing(Servers([word for name, value in given.items() for word in (f"--{name}", value)], 2)) as servers:
            target = asyncio.run(survey(servers.urls[0], settings))
            soak = Soak(servers, target.bystanders_key, QUESTIONS, 60 * minutes)
            intruder = Intruder(target, 60 * minutes)
            trouble = FolderTrouble(Path(folder), servers.ids)
            with probing(target.url) as health:
                asyncio.run(attacked(soak, intruder, trouble))
            restarts = asyncio.run(worker_restarts(servers, target.bystanders_key))
            losses = [line for line in servers.log if LOSS.search(line)]
    record = soak.record
    figures = {
        "minutes": minutes,
        "counts": dict(record.counts),
        "intruder": dict(intruder.counts),
        "folder": dict(trouble.counts),
        "wrong_answers": record.wrong + intruder.bad,
        "failed_at_seconds": [round(at, 1) for at in record.failed_at],
        "killed_at_seconds": [round(at, 1) for at in record.killed_at],
        "worker_restarts": restarts,
        "worker_losses": losses,
        "health_ms": report.quantiles(health["seconds"]),
        "health_failures": health["failures"],
        "all_attacks_sent_seconds": intruder.round_seconds,
        # Until every attack has been sent once, stores and buffers are not full.
        "memory": record.memory.growth(intruder.round_seconds or 0.0),
    }
    figures["failed"] = failed = failed_criteria(figures, record)
    Console().print(figures)
    report.save(out, figures)
    if failed:
        print("\n".join(f"failed: {sentence}" for sentence in failed), file=sys.stderr)
        raise typer.Exit(1)


def failed_criteria(figures: dict[str, Any], record: Record) -> list[str]:
    """One sentence for each criterion that the run failed."""
    failed = [f"wrong: {each}" for each in figures["wrong_answers"][:5]]
    lost = [at for at in record.failed_at if not any(0 <= at - killed <= LOSS_SECONDS for killed in record.killed_at)]
    if lost:
        failed.append(f"{len(lost)} requests failed that ran on no killed worker.")
    if figures["worker_restarts"] != [len(record.killed_at), 0]:
        failed.append(f"Workers were replaced {figures['worker_restarts']} times, but {len(record.killed_at)} killed.")
    return failed + memory.failed_criteria(figures["memory"], figures, MAX_HEALTH_MS)


if __name__ == "__main__":
    typer.run(main)
