"""Start-up failures are one sentence and exit code 2; no process keeps running."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from outrider.server import serve
from outrider.server.serve import listen
from outrider.server.settings import load_settings


def test_an_address_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"Cannot listen on 127.0.0.1:{port} .*choose another --port"):
            listen("127.0.0.1", port)
        with pytest.raises(OSError, match=r"choose another --metrics\.port"):
            listen("127.0.0.1", port, "--metrics.port")
    with listen("::1", 0) if socket.has_ipv6 else listen("127.0.0.1", 0) as other:
        assert other.getsockname()[1] > 0


def test_no_worker_starts_if_the_address_is_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(serve, "configure", lambda _: None)
    monkeypatch.setattr(serve, "WorkerProcess", lambda _: pytest.fail("a worker was started"))
    with listen("127.0.0.1", 0) as taken:
        assert serve.run(load_settings(None, {"server.port": taken.getsockname()[1]})) == 2
    assert capsys.readouterr().err.startswith("outrider: Cannot listen on")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--server.host", "0.0.0.0"], "there are no API keys"),
        (["--model.path", "/no/such/folder"], "There is no folder '/no/such/folder'"),
    ],
)
def test_a_start_failure_is_one_sentence_and_ends_the_worker(flags: list[str], message: str) -> None:
    command = [sys.executable, "-m", "outrider.server.cli", "serve", "--server.port", "0", *flags]
    done: Any = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.startswith("outrider: ") and done.stderr.count("\n") == 1
