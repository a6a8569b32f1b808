"""The dashboards' structure, layout and metrics. Needs no Prometheus."""

from __future__ import annotations

import re

import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.settings import Scheduling
from outrider.server.telemetry.metrics import Metrics
from tests.docker.dashboards import DOCKER, PANELS, RULES


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


def test_rules_follow_the_rules_that_they_use() -> None:
    recorded: set[str] = set()
    for rule in RULES:
        assert set(re.findall(r"\boutrider:[\w:]+", rule["expr"])) <= recorded
        recorded |= {rule["record"]} if "record" in rule else set()


def test_the_queue_alert_matches_the_default_bound() -> None:
    rule = next(rule for rule in RULES if rule.get("alert") == "OutriderQueueNearlyFull")
    assert rule["expr"] == f"outrider_requests_waiting > {Scheduling().max_waiting * 3 // 4}"


def test_grafanas_interval_is_the_scrape_interval() -> None:
    """The dashboards' $__rate_interval depends on it; if it is too short, panels have gaps."""
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert [source["jsonData"]["timeInterval"] for source in sources] == [scraped]
