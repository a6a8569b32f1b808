"""Processes: settings without keys, exit codes, the end with the front end, and programs that are stopped."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest

from outrider.server.engine import helper
from outrider.server.engine.helper import Helper, HelperEnded
from outrider.server.engine.program import Program
from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import load_settings
from outrider.server.settings.tree import decode_settings, encode_settings
from tests.patches import patched


def test_settings_arrive_with_masked_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(
        None,
        {
            "auth.keys": {"one": {"key": "a-long-secret", "datastores": ["some/folder"]}},
            "speculation.retrieval.datastores": ["a", "b"],
            "scheduling.queue_seconds": "inf",
        },
    )
    plain = encode_settings(settings)
    assert "a-long-secret" not in str(plain)
    monkeypatch.setenv("OUTRIDER_SERVER__PORT", "9")
    decoded = decode_settings(plain)
    assert decoded.auth.keys["one"].datastores == ("some/folder",)
    assert decoded.model_copy(update={"auth": settings.auth}) == settings


def test_the_worker_inherits_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_AUTH__KEYS", '{"one": "a-long-secret"}')
    worker = WorkerProcess(load_settings())
    try:
        inherited = Path(f"/proc/{worker._process.pid}/environ").read_bytes()
        assert b"a-long-secret" not in inherited and b"PATH=" in inherited
    finally:
        worker.close()


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="the system has no files of processes")
impatient = patched(helper, WATCH_SECONDS=0.02, STALL_SECONDS=0.3)


async def ask_all(each: Helper, *messages: bytes, seconds: float = 60.0) -> list[object]:
    return await asyncio.gather(*(each.ask(message, seconds) for message in messages), return_exceptions=True)


async def test_a_stopped_program_is_replaced() -> None:
    each = Helper("tests.server.engine.repeater")
    assert await ask_all(each, b"a", b"b") == [b"a", b"b"]
    assert each._process is not None
    os.kill(each._process.pid, signal.SIGSTOP)
    lost, answered = await ask_all(each, b"c", b"d")
    assert isinstance(lost, HelperEnded) and answered == b"d"
    await each.close()


async def test_a_program_that_starts_while_its_client_leaves_is_ended() -> None:
    each = Helper("tests.server.engine.repeater")
    asking = asyncio.create_task(each.ask(b"a"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await each.close()
    assert each._process is not None and not each._process.alive


async def test_a_failure_that_nobody_waits_for_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    each = Helper("tests.server.engine.repeater")
    await each.ask(b"a")
    asking = asyncio.create_task(each.ask(b"loop"))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await each.close()
    gc.collect()  # asyncio reports an exception when its task is deleted
    assert not caplog.records


def test_a_program_that_is_dropped_ends() -> None:
    each = Program("tests.server.engine.repeater")
    process = each._process
    del each
    gc.collect()
    assert process.returncode is not None


async def test_a_program_that_works_is_left_alone_until_its_message_takes_too_long() -> None:
    each = Helper("tests.server.engine.repeater")
    assert await ask_all(each, b"a") == [b"a"]
    process = each._process
    looping = asyncio.create_task(ask_all(each, b"loop", seconds=2.0))
    await asyncio.sleep(1.0)  # longer than a program may be without processor time
    assert process is each._process and process is not None and process.alive
    assert [type(found) for found in await looping] == [HelperEnded]
    assert await ask_all(each, b"b") == [b"b"]
    await each.close()
