"""The command `outrider deploy`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

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
