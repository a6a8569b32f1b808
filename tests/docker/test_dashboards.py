"""Prometheus' own tool accepts the configuration and the rules, and the alerts fire when they should."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docker.dashboards import DOCKER

pytestmark = pytest.mark.slow  # Prometheus may have to be downloaded


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed program, or the one of Debian's package."""
    found = shutil.which("promtool")
    if found:
        return Path(found)
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        pytest.skip("Prometheus is not installed, and apt-get is missing")
    folder = tmp_path_factory.mktemp("prometheus")
    fetch = ["apt-get", "download", "--quiet", "prometheus"]  # without installing it or starting a service
    if subprocess.run(fetch, cwd=folder, capture_output=True).returncode and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "--quiet"], capture_output=True, check=False)
        subprocess.run(fetch, cwd=folder, capture_output=True, check=False)
    packages = list(folder.glob("prometheus_*.deb"))
    if not packages:
        pytest.skip("Prometheus is not installed, and apt-get cannot download it")
    subprocess.run(["dpkg", "-x", str(packages[0]), str(folder)], check=True)
    return folder / "usr" / "bin" / "promtool"


@pytest.mark.parametrize(
    ("command", "file"),
    [
        (["check", "config"], DOCKER / "prometheus.yml"),
        (["check", "rules"], DOCKER / "rules.yml"),
        (["test", "rules"], Path(__file__).with_name("alerts.yml")),
    ],
)
def test_promtool_accepts_the_file(promtool: Path, command: list[str], file: Path) -> None:
    done = subprocess.run([promtool, *command, file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
