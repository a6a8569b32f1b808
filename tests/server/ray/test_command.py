"""The command `outrider deploy`, as far as it goes without Ray."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from server.cli import app
from server.ray import command


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


@pytest.mark.slow
def test_serving_on_one_machine_imports_nothing_of_ray() -> None:
    program = (
        "import sys, server.cli, server.front_end; print([n for n in sys.modules if n.startswith(('ray', 'server.ray.'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['server.ray.command']"
