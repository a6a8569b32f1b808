"""The container files, deployment examples and dashboards: linted, and compared with the code that they refer to."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.ray.command import NAME
from outrider.server.ray.scale import Scale
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics
from tests.stand_in import answering

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yml").read_text())
MANIFESTS: dict[str, Any] = {m["kind"]: m for m in yaml.safe_load_all((DOCKER / "kubernetes.yml").read_text())}
POD: dict[str, Any] = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
CONTAINER: dict[str, Any] = POD["containers"][0]
UNIT = (DOCKER / "outrider.service").read_text()


def instructions(name: str) -> list[str]:
    """The arguments of each instruction `name` in the Dockerfile, with continued lines joined."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^ *#.*\n", "", DOCKERFILE, flags=re.M)).splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.startswith(f"{name} ")]


def lint(*command: str) -> str:
    """The output of a linter, and its exit code if it fails."""
    done = subprocess.run([Path(sys.executable).parent / command[0], *command[1:]], capture_output=True, text=True, cwd=ROOT)
    return done.stdout + done.stderr + (f"exit code {done.returncode}" if done.returncode else "")


def test_hadolint_passes() -> None:
    assert lint("hadolint", "--failure-threshold", "style", "Dockerfile") == ""


def test_shellcheck_passes() -> None:
    assert lint("shellcheck", *(str(script) for folder in (DOCKER, ROOT / "release") for script in folder.glob("*.sh"))) == ""


def test_everything_that_is_installed_has_hashes() -> None:
    lines = [line.partition(" ") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9.-]+==[^*]+", name) and "--hash=sha256:" in rest for name, _, rest in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = ",".join(project["optional-dependencies"].keys() - {"torchao"})  # installed by nothing here
    command = [sys.executable, "requirements.py", f".[{extras}]", "./bench"]
    needed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = {canonicalize_name(Requirement(line).name) for line in needed.splitlines()}
    assert names <= {name.partition("==")[0] for name, _, _ in lines}


def test_images_of_others_have_digests() -> None:
    """A tag can be given to another image; the digest stays that of one."""
    bases = [line.split()[0] for line in instructions("FROM")]
    stages = {line.split()[-1] for line in instructions("FROM") if " AS " in line}
    images = {service["image"] for service in COMPOSE["services"].values()} - {"outrider"}
    assert all(re.fullmatch(r"[a-z0-9./-]+:[^@:]+@sha256:[0-9a-f]{64}", name) for name in {*bases, *images} - stages)
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    ecosystems = {(update["package-ecosystem"], update["directory"]) for update in updates}
    assert {("docker", "/"), ("docker-compose", "/docker")} <= ecosystems


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
def test_the_health_check_passes_if_the_server_answers_200(status: int | None, code: int) -> None:
    """By bash alone, which is in the image's base. A Python for each check would take half a second of a core."""
    (command,) = (json.loads(line.partition("CMD ")[2]) for line in instructions("HEALTHCHECK"))
    with answering({"/health": (status or 0, "")}) as url:
        environment = os.environ | {"OUTRIDER_SERVER__PORT": url.rpartition(":")[2] if status else "1"}
        done = subprocess.run(command, env=environment, capture_output=True)
    assert (command[0], done.returncode) == ("bash", code)


def variables() -> Iterator[tuple[str, str]]:
    """The file that sets a variable, and the variable's name."""
    yield from (("Dockerfile", pair.partition("=")[0]) for line in instructions("ENV") for pair in line.split())
    yield from (("compose.yml", name) for name in COMPOSE["services"]["outrider"]["environment"])
    yield from (("kubernetes.yml", variable["name"]) for variable in CONTAINER["env"])
    yield from (("outrider.service", name) for name in re.findall(r"^Environment=(\w+)=", UNIT, flags=re.M))


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, name in variables() if name.startswith("OUTRIDER_")])
def test_variables_are_settings(file: str, name: str) -> None:
    section, setting = name.removeprefix("OUTRIDER_").lower().split("__")
    assert setting in type(getattr(Settings(), section)).model_fields, f"{file}: {name}"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "outrider.service"
    file.write_text(UNIT.replace("/opt/outrider/bin/outrider", "/bin/true"))  # the program must exist
    checked = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_applications_are_built_by_this_code() -> None:
    cluster = next(yaml.safe_load_all((DOCKER / "kuberay.yml").read_text()))["spec"]["serveConfigV2"]
    for text in ((DOCKER / "ray.yml").read_text(), cluster):
        [application] = yaml.safe_load(text)["applications"]
        module, function = application["import_path"].split(":")
        assert application["name"] == NAME
        found = find_spec(module)
        assert found and found.origin and f"def {function}(" in Path(found.origin).read_text()
        Scale.model_validate({name: value for name, value in application["args"].items() if name != "config"})


DASHBOARDS = [json.loads(path.read_text()) for path in DOCKER.glob("grafana/dashboards/*.json")]
RULES = [rule for group in yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"] for rule in group["rules"]]


def metrics_in(expression: str) -> set[str]:
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
