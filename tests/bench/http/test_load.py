"""Load levels: their requests, goodput, and tables in 80 columns."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from bench.http import load as module
from bench.http.client import Outcome
from bench.http.load import Clients, Load, figures, run
from bench.plan import BenchError

LOAD = Load(("a", "b"), 0.05, 8, 0.0, "fusion", 1.0, target_ms=100.0)


def test_goodput_counts_answers_within_the_target() -> None:
    load = Load((), 10.0, 8, 0.0, "fusion", 0.0, target_ms=100.0)
    outcomes = [
        Outcome(200, 0.0, 1.0, 0.05, [0.1], [1, 2]),
        Outcome(200, 0.0, 2.0, 0.2, [0.3], [1]),
        Outcome(200, 0.0, 1.0, 0.01, error="lost"),
        Outcome(429, 0.0, 0.01),
    ]
    found = figures(load, "open", 2.0, outcomes, 10.0)
    assert (found["answers_per_second"], found["goodput_per_second"], found["tokens_per_second"]) == (0.2, 0.1, 0.3)
    assert (found["statuses"], found["errors"]) == ({"200": 3, "429": 1}, 1)
    assert found["end_to_end_ms"]["max"] == 2000.0


@pytest.mark.parametrize("kind", ["open", "closed"])
def test_requests_of_a_level(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []

    async def stream(client: httpx.AsyncClient, fields: dict[str, Any]) -> Outcome:
        sent.append(fields)
        await asyncio.sleep(0.001)
        return Outcome(200)

    monkeypatch.setattr(module, "stream", stream)
    clients = Clients(LOAD, httpx.AsyncClient(), "m")
    asyncio.run(clients.open(200.0) if kind == "open" else clients.closed(2))
    assert len(clients.outcomes) == len(sent) > 1
    assert {fields["prompt"] for fields in sent} <= {"a", "b"}
    assert all(fields["session_id"].startswith("load ") for fields in sent)
    assert {fields["speculation"]["drafter"] for fields in sent} == {"fusion"}


def test_a_missing_server_is_reported() -> None:
    with pytest.raises(BenchError, match=r"No server answers at http://127\.0\.0\.1:9"):
        run("http://127.0.0.1:9", LOAD, [1.0], [], None)
