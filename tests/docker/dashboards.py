"""The dashboards and rules in docker/, parsed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
DASHBOARDS: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(DOCKER.glob("grafana/dashboards/*.json"))
}
PANELS: list[tuple[str, dict[str, Any]]] = [
    (name, panel) for name, board in DASHBOARDS.items() for panel in board["panels"] if panel["type"] != "row"
]
RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DOCKER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
