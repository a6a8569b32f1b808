"""Settings are sent without the keys; a process reports its exit code; the worker ends with its front end."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from outrider.server.engine.worker_process import WorkerProcess
from outrider.server.settings import load_settings
from outrider.server.settings.plain import decode_settings, encode_settings


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


def test_the_worker_ends_with_its_front_end_and_ignores_ctrl_c() -> None:
    """Also while it imports and loads."""
    process = WorkerProcess(load_settings())
    os.kill(process._process.pid, 0)
    time.sleep(0.5)  # until the interpreter has started
    process._process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    assert process.alive
    process.socket.close()  # as if the front end had died
    process.wait(20)
    assert process.exit_code == 1
