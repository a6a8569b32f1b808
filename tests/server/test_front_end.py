"""Public addresses need keys; signals drain and end the server."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn

from server.front_end import DrainingServer, check_address
from server.settings import SettingsError, load_settings


def test_a_public_address_needs_keys_or_auth_open() -> None:
    for flags in ({}, {"server.host": "0.0.0.0", "auth.open": True}, {"server.host": "::", "auth.keys": {"a": "long-enough"}}):
        check_address(load_settings(None, cast(dict[str, Any], flags)))
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is a public address"):
        check_address(load_settings(None, {"server.host": "0.0.0.0"}))


def test_the_first_signal_drains_and_the_second_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    async def shutdown(self: uvicorn.Server, sockets: object = None) -> None:
        await asyncio.sleep(0.05)

    monkeypatch.setattr(uvicorn.Server, "shutdown", shutdown)
    engine = SimpleNamespace(drain=lambda: calls.append("drain"), abort=lambda: calls.append("abort"))

    async def stop(drain_seconds: float) -> None:
        await DrainingServer(uvicorn.Config(lambda: None), cast(Any, engine), drain_seconds).shutdown()

    asyncio.run(stop(10.0))
    assert calls == ["drain"]
    asyncio.run(stop(0.0))
    assert calls == ["drain", "drain", "abort"]
    server = DrainingServer(uvicorn.Config(lambda: None), cast(Any, engine), 1.0)
    server.handle_exit(signal.SIGTERM, None)
    assert server.should_exit and not server.force_exit
    server.handle_exit(signal.SIGTERM, None)
    assert server.force_exit
