"""The Helm chart: rendered by Helm's library, and checked against the schemas of Kubernetes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.server.settings import load_settings

chart: Any = pytest.importorskip("helm_python.chart", reason="needs the extra `clients`")
kubernetes_validate: Any = pytest.importorskip("kubernetes_validate")
pytestmark = pytest.mark.clients

DOCKER = Path(__file__).parents[2] / "docker"
ALL: dict[str, Any] = {
    "claim": "models",
    "settings": {"model.context_tokens": 8192, "server.path_prefix": "/llm", "logging.format": "json"},
    "container": {"resources": {"limits": {"memory": "9Gi"}}},
    "pod": {"nodeSelector": {"disk": "fast"}},
    "service": {"type": "LoadBalancer"},
    "ingress": {"host": "llm.example.com", "className": "nginx", "tlsSecret": "llm"},
    "podMonitor": True,
}


def rendered(values: dict[str, Any], name: str = "outrider") -> dict[str, Any]:
    """The manifests by their kind."""
    files = chart.Chart.load(DOCKER / "helm").render(values, name=name)
    return {each["kind"]: each for text in files.values() for each in yaml.safe_load_all(text) if each}


def test_without_values_it_is_the_manifest() -> None:
    plain = {each["kind"]: each for each in yaml.safe_load_all((DOCKER / "kubernetes.yml").read_text())}
    assert rendered({}) == plain
    assert chart.lint(str(DOCKER / "helm"))["errors"] == []


@pytest.mark.parametrize("values", [{}, ALL, {"inferencePool": True}, {**ALL, "inferencePool": True}])
def test_what_is_rendered_is_valid(values: dict[str, Any]) -> None:
    for kind, manifest in rendered(values, "mine").items():
        assert manifest["metadata"]["name"] == "mine"
        if kind != "PodMonitor":  # which is no resource of Kubernetes' own
            kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("values", [ALL, {**ALL, "inferencePool": True}])
def test_settings_reach_the_server(monkeypatch: pytest.MonkeyPatch, values: dict[str, Any]) -> None:
    pod = rendered(values)["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    variables = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert len({each["name"] for each in container["env"]}) == len(container["env"])
    assert ("OUTRIDER_AUTH__FILE" in variables) != ("inferencePool" in values)
    for name, value in variables.items():
        if name != "OUTRIDER_AUTH__FILE":  # which is in the pod only
            monkeypatch.setenv(name, value)
    settings = load_settings(None, {})
    assert (settings.model.context_tokens, settings.server.path_prefix, settings.logging.format) == (8192, "/llm", "json")
    found = (settings.auth.open, settings.metrics.port, settings.server.allowed_hosts)
    assert found == ((True, None, ("*",)) if "inferencePool" in values else (False, 9464, None))
    assert container["resources"] == {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "9Gi"}}
    assert {"name": "state", "persistentVolumeClaim": {"claimName": "models"}} in pod["volumes"]
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
