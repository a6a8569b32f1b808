"""A program that is stopped or does not end is replaced, and whoever waits for it is told."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from outrider.server.engine import helper
from outrider.server.engine.helper import Helper, HelperEnded

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system has no files of processes")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(helper, "STALL_SECONDS", 0.3)


async def ask_all(each: Helper, *messages: bytes, seconds: float = 60.0) -> list[object]:
    return await asyncio.gather(*(each.ask(message, seconds) for message in messages), return_exceptions=True)


async def test_a_stopped_program_is_replaced() -> None:
    each = Helper("tests.server.engine.repeater")
    assert await ask_all(each, b"a", b"b") == [b"a", b"b"]
    assert each._process is not None
    os.kill(each._process.pid, signal.SIGSTOP)
    assert [type(found) for found in await ask_all(each, b"c", b"d")] == [HelperEnded] * 2
    assert await ask_all(each, b"e") == [b"e"]
    await each.close()


async def test_a_program_that_works_is_left_alone_until_its_message_takes_too_long() -> None:
    each = Helper("tests.server.engine.repeater")
    assert await ask_all(each, b"a") == [b"a"]
    process = each._process
    looping = asyncio.create_task(ask_all(each, b"loop", seconds=2.0))
    await asyncio.sleep(1.0)  # longer than a program may be without processor time
    assert process is each._process and process is not None and process.poll() is None
    assert [type(found) for found in await looping] == [HelperEnded]
    assert await ask_all(each, b"b") == [b"b"]
    await each.close()
