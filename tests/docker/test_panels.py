"""The dashboards' structure, layout and metrics. Needs no Prometheus."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families

from outrider.server.telemetry.metrics import Metrics
from tests.docker.dashboards import PANELS, RULES


def metrics_in(expression: str) -> set[str]:
    """The server's metrics in an expression."""
    names = set(re.findall(r"\boutrider_\w+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def known_metrics() -> set[str]:
    families = text_string_to_metric_families(Metrics().render().decode())
    named = {family.name + "_total" * (family.type == "counter") for family in families}
    return {name for name in named if not name.endswith("_created")}


def test_panels_show_all_metrics_and_no_unknown_ones() -> None:
    shown = {name for _, panel in PANELS for target in panel["targets"] for name in metrics_in(target["expr"])}
    assert shown == known_metrics()
    assert {name for rule in RULES for name in metrics_in(rule["expr"])} <= known_metrics()
