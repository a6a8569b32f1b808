"""The examples of a Ray cluster: compared with the code that reads them."""

from __future__ import annotations

import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from outrider.server.ray.command import ENVIRONMENT, NAME
from outrider.server.ray.coordinator import merged
from outrider.server.ray.scale import Scale
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import Metrics
from tests.docker.manifest import NETWORK_POLICY, RAY_SERVICE
from tests.docker.test_files import MANIFESTS

ROOT = Path(__file__).parents[2]
SERVE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "ray.yml").read_text())
KUBERAY: dict[str, Any]
POLICY: dict[str, Any]
KUBERAY, POLICY = yaml.safe_load_all((ROOT / "docker" / "kuberay.yml").read_text())
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


def test_the_manifest_has_the_fields_of_its_kind() -> None:
    jsonschema.validate(KUBERAY, RAY_SERVICE)
    jsonschema.validate(POLICY, NETWORK_POLICY)


def test_ray_is_the_version_of_the_extra() -> None:
    version = KUBERAY["spec"]["rayClusterConfig"]["rayVersion"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["ray"] == [f"ray[serve]>={version.rsplit('.', 1)[0]},<2.61"]
    assert f"\nray=={version} " in (ROOT / "constraints.txt").read_text()
    assert f"ray[serve]=={version}" in (ROOT / "docs" / "scale.md").read_text()


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
        for container in (*pod["initContainers"], *pod["containers"]):
            assert container["securityContext"] == one["containers"][0]["securityContext"]
        for container in pod["containers"]:
            written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
            assert written == {"/var/lib/outrider", "/var/cache/outrider", "/tmp"}
    for group in GROUPS[1:]:
        assert group["template"]["spec"]["automountServiceAccountToken"] is False


def test_rays_own_ports_need_a_token_and_are_closed_to_other_pods() -> None:
    assert KUBERAY["spec"]["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    cluster = {"matchExpressions": [{"key": "ray.io/cluster", "operator": "Exists"}]}
    assert POLICY["spec"]["podSelector"] == cluster
    peers = [rule for rule in POLICY["spec"]["ingress"] if "ports" not in rule]
    assert [rule["from"][0]["podSelector"] for rule in peers] == [cluster]
    [public] = [rule for rule in POLICY["spec"]["ingress"] if "from" not in rule]
    assert public["ports"] == [{"port": yaml.safe_load(KUBERAY["spec"]["serveConfigV2"])["http_options"]["port"]}]


def test_prometheus_scrapes_the_ingress_with_the_rules_of_one_server() -> None:
    scrape = yaml.safe_load((ROOT / "docker" / "ray-prometheus.yml").read_text())
    one = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    assert scrape["rule_files"] == one["rule_files"]
    jobs = {job["job_name"]: job for job in scrape["scrape_configs"]}
    assert jobs["outrider"]["static_configs"] == [{"targets": [f"head:{Settings().server.port}"]}]
    assert one["scrape_configs"][0]["job_name"] in jobs


def test_dashboards_choose_a_label_that_the_page_has() -> None:
    page = merged({"one": Metrics().render()}).decode()
    for file in (ROOT / "docker" / "grafana" / "dashboards").glob("*.json"):
        text = file.read_text()
        assert text.count('replica=~\\"$replica\\"') > 10
        assert "label_values(outrider_steps_total" in text
    assert 'outrider_steps_total{replica="one"}' in page
