"""`python -m tests.soak`: 200 clients of 20 keys use all features of several models for ten minutes.

Every key has ten clients with the same demands, so equal shares are due to all. Meanwhile another key attacks. Afterwards each
process but the front end is killed and stopped in turn, while the clients go on. Names the criteria that the server failed.
"""

import asyncio
import os
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
import yaml
from rich.console import Console

from bench import report
from bench.http.load import new_client
from bench.http.process import ServerProcess, start_server
from tests.soak import memory
from tests.soak.connections import survey
from tests.soak.demands import ROLES, Demand, all_known, answer, demands, is_right, save_models
from tests.soak.intruder import Intruder
from tests.soak.memory import Memory, processes_of
from tests.soak.prober import probing

KEYS = [f"key-of-client-number-{number:02d}" for number in range(20)]
ATTACKER = "key-of-the-attacker"
SAMPLE_SECONDS, SETTLED_SECONDS = 5.0, 10.0
# By then, the pictures that the front end keeps fill their 128 MB.
FULL_SECONDS = 240.0
# After a kill and after a stop, until the next one: a stopped helper is noticed after half a minute.
FAULT_SECONDS = {signal.SIGKILL: 8.0, signal.SIGSTOP: 40.0}
LEAVES_SECONDS = 0.4
MAX_SHARE, MAX_HEALTH_MS = 0.2, 500.0


@dataclass
class Record:
    """What the clients got."""

    right: Counter[str] = field(default_factory=Counter)  # by role
    wrong: list[str] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)  # by role
    lost: list[str] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)  # by what the client got
    requests: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))  # by role and key
    tokens: defaultdict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: list[float] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)


class Load:
    """The clients of one server."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._known: dict[str, list[Any]] = {}
        self._stopping = False
        self.record = Record()
        limits = httpx.Limits(max_connections=None)
        self._clients = [self._client(key, limits) for key in KEYS]

    def _client(self, key: str, limits: httpx.Limits) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self._server.url, headers=headers, timeout=600, limits=limits)

    async def learn(self) -> None:
        """Asks for each known answer once, without drafts, one after the other."""
        for demand in all_known():
            response = await self._clients[0].post(demand.path, json=demand.sent(0, plain=True))
            assert response.status_code == 200, response.text
            self._known[demand.known], _ = answer(demand, response)

    async def run(self, seconds: float, faults: bool) -> list[dict[str, Any]]:
        """Runs all clients for this time, or until all faults have been made. Returns what each fault led to."""
        self._stopping = False
        clients = [asyncio.ensure_future(self._use(key, number)) for key in range(len(KEYS)) for number in range(len(ROLES))]
        watching = asyncio.ensure_future(self._watch())
        try:
            made = await self._make_faults() if faults else await asyncio.sleep(seconds, [])
        finally:
            self._stopping = True
            await asyncio.gather(*clients, watching)
        return made

    async def _use(self, key: int, number: int) -> None:
        for demand in demands(ROLES[number], number):
            while not self._stopping and not await self._ask(key, number, demand):
                pass  # refused: asked again
            if self._stopping:
                return

    async def _ask(self, key: int, number: int, demand: Demand) -> bool:
        """Whether a demand has had its answer; otherwise waits as the server has said."""
        if demand.role == "leaves":
            await self._leave(key, demand)
            return True
        started = time.perf_counter()
        try:
            body = demand.sent(number, plain=False) if demand.method == "POST" else None
            response = await self._clients[key].request(demand.method, demand.path, json=body)
            if response.status_code == 200:
                self._check(key, demand, response)
        except RuntimeError as error:
            self.record.failed[f"{demand.role}: stream ended: {error}"] += 1
            return True
        except httpx.HTTPError as error:
            self.record.lost.append(f"{demand.role}: {error!r}")
            return True
        self.record.seconds.append(time.perf_counter() - started)
        if response.status_code == 429:
            self.record.refused[demand.role] += 1
        elif response.status_code != 200:
            message = response.json()["error"]["message"]
            self.record.failed[f"{demand.role}: {response.status_code} {message}"] += 1
        if response.status_code in (429, 503, 529):
            await asyncio.sleep(float(response.headers["retry-after"]))
        return response.status_code != 429

    def _check(self, key: int, demand: Demand, response: httpx.Response) -> None:
        tokens = 1
        if demand.known:
            found, tokens = answer(demand, response)
            if not is_right(found, self._known[demand.known]):
                self.record.wrong.append(f"{demand.known}: {str(found)[:200]} for {str(self._known[demand.known])[:200]}")
                return
        self.record.right[demand.role] += 1
        self.record.requests[demand.role][key] += 1
        self.record.tokens[demand.role][key] += tokens

    async def _leave(self, key: int, demand: Demand) -> None:
        """Reads a stream for a while, and hangs up."""
        try:
            async with (
                asyncio.timeout(LEAVES_SECONDS),
                self._clients[key].stream("POST", demand.path, json=demand.body) as response,
            ):
                async for _ in response.aiter_bytes():
                    pass
        except (TimeoutError, httpx.HTTPError):
            pass
        self.record.right["leaves"] += 1
        await asyncio.sleep(1.0)

    def processes(self) -> list[tuple[str, int]]:
        """The server's processes, by what they do."""
        return [*processes_of(self._server.process.pid)]

    async def _watch(self) -> None:
        while not self._stopping:
            self.record.memory.sample(self.processes())
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _make_faults(self) -> list[dict[str, Any]]:
        """Kills and then stops one process of each kind; returns what clients got meanwhile."""
        made = []
        for number, seconds in FAULT_SECONDS.items():
            for name in sorted({name for name, _ in self.processes()} - {"front end"}):
                failed, lost = self.record.failed.copy(), len(self.record.lost)
                found = [process for each, process in self.processes() if each == name]
                if found:
                    os.kill(found[0], number)
                right = self.record.right.copy()
                await asyncio.sleep(seconds)
                made.append(
                    {
                        "process": name,
                        "signal": number.name if found else "it did not run",
                        "seconds": seconds,
                        "right": dict(self.record.right - right),
                        "failed": dict(self.record.failed - failed),
                        "lost": self.record.lost[lost:],
                    }
                )
        return made

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def shares(by_key: Counter[int]) -> dict[str, float]:
    """The mean of all keys, and the least and the largest deviation from it."""
    counts = [by_key[key] for key in range(len(KEYS))]
    mean = statistics.mean(counts)
    return {"mean": round(mean, 1), "least": round(min(counts) / mean - 1, 3), "most": round(max(counts) / mean - 1, 3)}


def figures_of(record: Record, attacked_seconds: float = 0.0) -> dict[str, Any]:
    """`attacked_seconds`: until every attack has been sent once. Before, stores and buffers are not full."""
    return {
        "right": dict(record.right),
        "wrong": record.wrong,
        "lost": record.lost,
        "failed": dict(record.failed),
        "refused_429": dict(record.refused),
        "requests_per_key": {role: shares(counts) for role, counts in record.requests.items()},
        "tokens_per_key": {role: shares(counts) for role, counts in record.tokens.items()},
        "ms": report.quantiles(record.seconds),
        "memory_mb": record.memory.growth(max(FULL_SECONDS, attacked_seconds)),
    }


async def attacked(load: Load, server: ServerProcess, seconds: float) -> dict[str, Any]:
    """Runs the clients beside the attacks; returns the figures of both."""
    intruder = Intruder(survey(server.url, ATTACKER), seconds)
    with probing(server.url) as health:
        async with new_client("") as client:
            await asyncio.gather(load.run(seconds, faults=False), intruder.run(client))
    load.record.wrong += intruder.bad
    return figures_of(load.record, intruder.round_seconds or 0.0) | {
        "attacks": dict(intruder.counts),
        "health_ms": report.quantiles(health["seconds"]),
        "health_failures": health["failures"],
    }


async def measured(server: ServerProcess, minutes: float, faults: bool, out: Path) -> dict[str, Any]:
    """The run. Saves what it has found before the faults."""
    load = Load(server)
    await load.learn()
    figures = await attacked(load, server, 60 * minutes)
    await asyncio.sleep(SETTLED_SECONDS)
    load.record.memory.sample(load.processes())
    figures["memory_mb_after"] = {name: samples[-1].mb for name, samples in load.record.memory.samples.items()}
    report.save(out, figures)
    if faults:
        load.record = Record()
        with probing(server.url) as health:
            made = await load.run(0, faults=True)
        found = figures_of(load.record)
        del found["memory_mb"]  # of processes that have just started
        figures["faults"] = {"each": made, **found, "health_ms": report.quantiles(health["seconds"])}
    load.record = Record()
    await load.learn()  # all helpers are back
    await load.close()
    return figures


def failed_criteria(figures: dict[str, Any]) -> list[str]:
    """One sentence for each criterion that the run failed."""
    failed = [f"wrong: {each}" for each in (*figures["wrong"], *figures.get("faults", {}).get("wrong", ()))]
    failed += [f"lost: {each}" for each in figures["lost"]] + [f"failed: {each}" for each in figures["failed"]]
    for role, share in (*figures["requests_per_key"].items(), *figures["tokens_per_key"].items()):
        if max(-share["least"], share["most"]) > MAX_SHARE:
            failed.append(f"The shares of keys in {role} are {share['least']:+.0%} to {share['most']:+.0%}.")
    return failed + memory.failed_criteria(figures["memory_mb"], figures, MAX_HEALTH_MS)


def main(
    minutes: Annotated[float, typer.Option(help="Duration without faults.")] = 10.0,
    faults: Annotated[bool, typer.Option(help="Kill and stop each helper process afterwards.")] = True,
    out: Annotated[Path, typer.Option(help="Save the figures as JSON.")] = report.RESULTS / "soak-embedded-cpu.json",
) -> None:
    """Start the server and run the clients. Exit code 1 if it fails a criterion."""
    with tempfile.TemporaryDirectory(prefix="outrider-soak-") as folder:
        settings = {
            "models": save_models(Path(folder)),
            "auth": {"keys": {f"key {number}": key for number, key in enumerate((*KEYS, ATTACKER))}},
            "sessions": {"folder": str(Path(folder) / "sessions"), "capacity": 8},
        }
        config = Path(folder) / "soak.yaml"
        config.write_text(yaml.safe_dump(settings))
        with start_server(["--config", str(config)]) as server:
            figures = asyncio.run(measured(server, minutes, faults, out))
            figures["log"] = [line for line in server.log if "Traceback" in line or "WARNING" in line.upper()][-20:]
    figures = {"minutes": minutes, "keys": len(KEYS), "clients": len(KEYS) * len(ROLES), **figures}
    figures["missed"] = missed = failed_criteria(figures)
    Console().print(figures)
    report.save(out, figures)
    if missed:
        print("\n".join(missed), file=sys.stderr)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
