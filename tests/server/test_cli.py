"""Start-up mistakes are one sentence and exit code 2; Ctrl-C ends quietly; a table is built from the command line."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import start


def outrider(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "server.cli", *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "--port", "99999"], "'server.port' is wrong"),
        (["serve", "--prot", "8000"], "is not a flag"),
        (["serve", "--speculation.drafer", "none"], "no setting 'speculation.drafer'"),
        (["serve", "--drafter", "magic"], "'speculation.drafter' is wrong"),
        (["serve", "--config", "/no/such.yaml"], "cannot be read"),
        (["serve", "--model", "/no/such/model"], "/no/such/model"),
        (["datastore", "build", "/no/such/text", "--out", "/tmp/x"], "no file or folder"),
        (["datastore", "build", "--kind", "magic", "x", "--out", "/tmp/x"], "no datastore kind"),
        (["bench", "decode", "--drafter", "magic"], "no drafter magic"),
        (["bench", "decode", "--prompts", "/no/such.jsonl"], "Cannot read prompts"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], words: str) -> None:
    done = outrider(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = outrider("serve", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "Cannot listen" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_worker_that_cannot_load_ends_the_server(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.ngram"
    foreign.write_bytes(b"nothing of the kind")
    done = outrider("serve", "--port", "0", "--speculation.trigram.table", str(foreign))
    assert done.returncode == 2
    assert "is not a datastore file" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_quietly() -> None:
    process, _ = start()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert "Traceback" not in errors
    assert process.returncode == 0


def test_a_table_is_built_from_texts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import os\nimport sys\n" * 20)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "def f(x):\n    return x\n"}) + "\n")
    out = tmp_path / "table.ngram"
    done = outrider("datastore", "build", str(tmp_path / "a.py"), str(tmp_path / "b.jsonl"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "contexts" in done.stdout
    assert out.stat().st_size > 0
    (tmp_path / "bad.jsonl").write_text("{}\n")
    bad = outrider("datastore", "build", str(tmp_path / "bad.jsonl"), "--out", str(out))
    assert bad.returncode == 2
    assert "bad.jsonl line 1" in bad.stderr
