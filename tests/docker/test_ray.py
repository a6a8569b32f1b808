"""The examples of a Ray cluster: compared with the code that reads them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from outrider.server.ray.command import ENVIRONMENT, NAME
from outrider.server.ray.scale import Scale
from tests.docker.test_files import MANIFESTS

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


def test_every_pod_has_the_settings_and_room_for_a_replica_and_only_the_head_the_keys() -> None:
    arguments = applications()[1]["args"]
    for group in GROUPS:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        variables = {variable["name"]: variable["value"] for variable in container["env"]}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        assert str(Path(arguments["config"]).parent) in mounts
        if group is GROUPS[0]:
            assert str(Path(variables["OUTRIDER_AUTH__FILE"]).parent) in mounts
        else:
            assert not any("secret" in volume for volume in pod["volumes"]) and "OUTRIDER_AUTH__FILE" not in variables
        assert variables.items() >= ENVIRONMENT.items()
        assert int(container["resources"]["requests"]["cpu"]) >= arguments["cpus"]


def test_every_pod_is_as_hard_as_that_of_one_server() -> None:
    one = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
    for group in GROUPS:
        pod = group["template"]["spec"]
        assert pod["securityContext"] == one["securityContext"]
        assert pod["enableServiceLinks"] == one["enableServiceLinks"]
        for container in pod["containers"]:
            assert container["securityContext"] == one["containers"][0]["securityContext"]
            written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert written == {"/var/lib/outrider", "/tmp"}
    for group in GROUPS[1:]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False
