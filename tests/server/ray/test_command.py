"""The command `outrider deploy`."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from outrider import models
from outrider.server.cli import app
from outrider.server.ray import command
from outrider.server.ray.scale import Scale
from outrider.server.settings import SettingsError


def test_a_missing_ray_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["deploy"])
    assert result.exit_code == 2
    assert "pip install 'outrider[ray]'" in result.output


@pytest.mark.parametrize("arguments", [["--replicas", "0"], ["--nonsense", "1"], ["--replicas", "3", "--max-replicas", "2"]])
def test_wrong_options_are_refused_before_ray_is_started(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: name)
    result = CliRunner().invoke(app, ["deploy", *arguments])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_new_cluster_without_room_is_refused_and_a_running_one_warned(capsys: pytest.CaptureFixture[str]) -> None:
    scale = Scale(replicas=2, gpus=1)
    with pytest.raises(SettingsError, match=r"reserves 2 GPUs, and the cluster has 1; use fewer --replicas or --gpus"):
        command.check_room({"CPU": 3.0, "GPU": 1.0}, scale, started=True)
    command.check_room({"CPU": 2.0, "GPU": 2.0}, scale, started=False)
    assert "reserves 3 CPUs, and the cluster has 2" in capsys.readouterr().err
    command.check_room({"CPU": 3.0, "GPU": 2.0}, scale, started=True)
    assert not capsys.readouterr().err


@pytest.mark.ray
@pytest.mark.xdist_group("ray")  # one cluster at a time
@pytest.mark.timeout(300)
def test_one_machine_serves_more_replicas_than_it_has_cores_until_a_signal(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    file = tmp_path / "settings.yaml"
    file.write_text(f"server: {{port: {port}}}\nmodel: {{threads: 1}}\nspeculation: {{max_nodes: 12}}\n")
    flags = ["--config", str(file), "--replicas", "2", "--cpus", str(os.cpu_count())]
    environment = os.environ | {"PYTHONPATH": str(Path(models.__file__).parents[1]), "RAY_USAGE_STATS_ENABLED": "0"}
    program = [sys.executable, "-m", "outrider.server.cli", "deploy", *flags]
    with subprocess.Popen(program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        try:
            assert any(
                f"outrider: serving {models.NAME} at http://127.0.0.1:{port}/v1".encode() in line for line in process.stdout
            )
            body = {"model": models.NAME, "messages": [{"role": "user", "content": "Write a function."}], "max_tokens": 4}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == 4
        finally:
            process.terminate()
            output = process.stdout.read()
    assert process.returncode == 0
    assert b"outrider: stopping" in output and b"SIGTERM received" not in output
