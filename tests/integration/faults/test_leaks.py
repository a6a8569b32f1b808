"""A thousand clients that disconnect midway leak no slot and no queue place, and damage no session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import httpx
import pytest

from tests.requests import body, complete
from tests.servers import Served, serving

SLOTS, CAPACITY, CLIENTS, DISCONNECTS = 3, 2, 12, 1000


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    flags = {"scheduling.max_active": SLOTS, "sessions.slots": SLOTS, "sessions.capacity": CAPACITY}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    with serving("--model.dtype", "float32", "--logging.level", "warning", *words) as server:
        yield server


@pytest.mark.slow
def test_a_thousand_disconnects_leak_nothing(server: Served) -> None:
    random = Random(0)
    expected = {f"s{number}": complete(server, prompt=f"def f{number}(", max_tokens=12)["choices"] for number in range(4)}

    async def run() -> None:
        turns = iter(range(DISCONNECTS))
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def disconnect() -> None:
                for _ in turns:
                    name = f"s{random.randrange(4)}"
                    fields = body(server, prompt=f"def f{name[1:]}(", max_tokens=400, temperature=1.2)
                    fields |= {"stream": random.random() < 0.8}
                    fields |= {"session_id": name} if random.random() < 0.5 else {}
                    fields |= {"speculation": {"drafter": random.choice(["none", "trigram", "fusion", "lookahead"])}}
                    try:  # before the answer, in the queue, at the first packet or later
                        async with asyncio.timeout(random.choice([0.0005, 0.003, 0.02, 0.05])):
                            async with client.stream("POST", "/v1/completions", json=fields) as response:
                                async for _ in response.aiter_raw():
                                    pass
                    except (TimeoutError, httpx.HTTPError):
                        pass

            await asyncio.gather(*(disconnect() for _ in range(CLIENTS)))
            for _ in range(200):
                text = (await client.get("/metrics")).text
                if "requests_running 0.0" in text and "requests_waiting 0.0" in text:
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("requests of disconnected clients are still there")

    asyncio.run(run())
    # All slots are free, and every session continues correctly.
    long = {"max_tokens": 30, "temperature": 0.8, "ignore_eos": True}

    async def together() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            asks = (
                client.post("/v1/completions", json=body(server, **long, session_id=f"n{n}")) for n in range(SLOTS + CAPACITY)
            )
            return [response.status_code for response in await asyncio.gather(*asks)]

    assert asyncio.run(together()) == [200] * (SLOTS + CAPACITY)
    for name, choices in expected.items():
        again = complete(server, prompt=f"def f{name[1:]}(", max_tokens=12, session_id=name)
        assert again["choices"] == choices
    sessions = next(line for line in server.http.get("/metrics").text.splitlines() if line.startswith("outrider_sessions "))
    assert float(sessions.split()[1]) <= CAPACITY
    assert server.process.poll() is None
