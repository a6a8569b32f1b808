"""Public addresses need keys; start-up failures are one sentence and exit code 2; no process keeps running."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from outrider import models
from outrider.server import serve
from outrider.server.serve import check_address, listen
from outrider.server.settings import SettingsError, load_settings


def test_an_address_in_use_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"Cannot listen on 127.0.0.1:{port} .*choose another --port"):
            listen("127.0.0.1", port)
        with pytest.raises(OSError, match=r"choose another --metrics\.port"):
            listen("127.0.0.1", port, "--metrics.port")
    with listen("::1", 0) if socket.has_ipv6 else listen("127.0.0.1", 0) as other:
        assert other.getsockname()[1] > 0


def test_a_public_address_needs_keys_or_auth_open() -> None:
    for flags in ({}, {"server.host": "0.0.0.0", "auth.open": True}, {"server.host": "::", "auth.keys": {"a": "long-enough"}}):
        check_address(load_settings(None, cast(dict[str, Any], flags)))
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is a public address"):
        check_address(load_settings(None, {"server.host": "0.0.0.0"}))


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Starts a server in this process, which must fail before a worker starts. Returns its sentence."""
    monkeypatch.setattr(serve, "configure", lambda _: None)
    monkeypatch.setattr(serve, "WorkerProcess", lambda: pytest.fail("a worker was started"))

    def start(**flags: Any) -> str:
        settings = {name if "." in name else f"server.{name}": value for name, value in flags.items()}
        assert serve.run(load_settings(None, settings)) == 2
        return capsys.readouterr().err

    return start


def test_no_worker_starts_for_an_encoder(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    message = refused(port=0, **{"model.path": str(tmp_path)})
    assert message == f"outrider: {tmp_path} is an encoder and writes no text; serve it with --models.paths instead.\n"


def test_no_worker_starts_at_a_public_address_without_keys(refused: Callable[..., str]) -> None:
    message = refused(host="0.0.0.0", port=0)
    assert message.startswith("outrider: ") and message.count("\n") == 1
    assert "there are no API keys; set auth.keys" in message


@pytest.mark.parametrize("path", ["bad.gguf", "no/such/folder", "empty"])
@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
def test_a_bad_model_is_refused_before_anything_heavy_is_imported(tmp_path: Path, path: str, setting: str) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    (tmp_path / "empty").mkdir()
    program = (
        "import sys; from outrider.server.serve import run; from outrider.server.settings import load_settings;"
        f"code = run(load_settings(None, {{'server.port': 0, {setting!r}: {path!r}}}));"
        "print(code, *{'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.stdout == "2\n"
    assert done.stderr.startswith("outrider: ") and done.stderr.count("\n") == 1 and "tokenizer of" not in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer.json", None, "The tokenizer of"),
        ("config.json", {"num_hidden_layers": 10**6}, "says that it has 1000000 layers"),
    ],
)
def test_a_damaged_model_is_one_sentence_whichever_process_reads_it(
    tmp_path: Path, file: str, content: Any, reason: str
) -> None:
    folder = shutil.copytree(models.TARGET, tmp_path / "model")
    damaged = content and json.loads((folder / file).read_text()) | content
    (folder / file).write_text(json.dumps(damaged))
    command = [sys.executable, "-m", "outrider.server.cli", "serve", "--server.port", "0", "--model.path", str(folder)]
    done: Any = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.startswith("outrider: ") and "serving" not in line]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(lines) == 1 and reason in lines[0] and lines[0].endswith("name another one.")
