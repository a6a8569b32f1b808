"""The dashboards show all metrics, and Prometheus' own tool accepts the rules, whose alerts fire when they should."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.telemetry.metrics import Metrics

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARDS = [json.loads(path.read_text()) for path in DOCKER.glob("grafana/dashboards/*.json")]
RULES = [rule for group in yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"] for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
    """The server's metrics in an expression."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\boutrider_\w+", expression)}


def test_panels_show_all_metrics_and_no_unknown_ones() -> None:
    families = text_string_to_metric_families(Metrics().render().decode())
    named = {family.name + "_total" * (family.type == "counter") for family in families}
    known = {name for name in named if not name.endswith("_created")}
    panels = [panel for board in DASHBOARDS for panel in board["panels"] if panel["type"] != "row"]
    assert known == {name for panel in panels for target in panel["targets"] for name in metrics_in(target["expr"])}
    assert known >= {name for rule in RULES for name in metrics_in(rule["expr"])}


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


@pytest.mark.slow  # Prometheus may have to be downloaded
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
