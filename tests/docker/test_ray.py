"""The examples of a Ray cluster: compared with the code that reads them."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from outrider.server.ray.command import ENVIRONMENT, NAME
from outrider.server.ray.scale import Scale

ROOT = Path(__file__).parents[2]
SERVE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "ray.yml").read_text())
KUBERAY: dict[str, Any] = next(yaml.safe_load_all((ROOT / "docker" / "kuberay.yml").read_text()))
GROUPS = [KUBERAY["spec"]["rayClusterConfig"]["headGroupSpec"], *KUBERAY["spec"]["rayClusterConfig"]["workerGroupSpecs"]]


def applications() -> list[dict[str, Any]]:
    return [*SERVE["applications"], *yaml.safe_load(KUBERAY["spec"]["serveConfigV2"])["applications"]]


def test_the_applications_are_built_by_this_code() -> None:
    for application in applications():
        module, function = application["import_path"].split(":")
        assert application["name"] == NAME
        found = find_spec(module)
        assert found and found.origin and f"def {function}(" in Path(found.origin).read_text()
        Scale.model_validate({name: value for name, value in application["args"].items() if name != "config"})


def test_every_pod_has_the_settings_and_room_for_a_replica() -> None:
    arguments = applications()[1]["args"]
    for group in GROUPS:
        [container] = group["template"]["spec"]["containers"]
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        assert str(Path(arguments["config"]).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
        assert variables.items() >= ENVIRONMENT.items()
        assert int(container["resources"]["requests"]["cpu"]) >= arguments["cpus"]
