"""A server of several is restarted once its requests have ended, and the others answer meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing

import httpx
import pytest

from tests.soak.servers import Servers


@pytest.mark.slow
def test_a_restarted_server_has_another_process_and_waits_for_its_requests() -> None:
    async def run(servers: Servers) -> None:
        first, second = servers.urls
        ids = list(servers.ids)
        told: list[str] = []

        async def before_use(url: str) -> None:
            told.append(url)
            with servers.one() as other:
                assert other == first

        with ExitStack() as requests:
            while requests.enter_context(servers.one()) != second:
                pass
            restarting = asyncio.create_task(servers.restart(1, before_use))
            await asyncio.sleep(0.5)
            with servers.one() as url:
                assert url == first
            assert servers.urls == [first, second]
        await restarting
        [started] = told
        assert servers.urls == [first, started] and servers.ids[0] == ids[0] and servers.ids[1] != ids[1]
        assert httpx.get(f"{started}/ready").status_code == 200

    with closing(Servers(["--model.threads", "1"], 2)) as servers:
        asyncio.run(run(servers))
