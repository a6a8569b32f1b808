"""The dashboards' structure, layout and metrics. Needs no Prometheus."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from outrider.server.settings import Scheduling
from outrider.server.telemetry.metrics import Metrics
from tests.docker.dashboards import DASHBOARDS, DOCKER, PANELS, RULES

BOARDS = pytest.mark.parametrize("board", DASHBOARDS.values(), ids=list(DASHBOARDS))
COLUMNS = 24  # of Grafana's layout grid


def metrics_in(expression: str) -> set[str]:
    """The server's metrics in an expression."""
    names = set(re.findall(r"\boutrider_\w+", expression))
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def known_metrics() -> set[str]:
    families = text_string_to_metric_families(Metrics().render().decode())
    named = {family.name + "_total" * (family.type == "counter") for family in families}
    return {name for name in named if not name.endswith("_created")}


@pytest.mark.parametrize("panel", [panel for _, panel in PANELS], ids=[f"{name}: {panel['id']}" for name, panel in PANELS])
def test_a_panel_has_description_unit_and_legend(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["legendFormat"] for target in panel["targets"])
    assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
    heatmap = panel["type"] == "heatmap"
    assert (panel["options"]["yAxis"] if heatmap else panel["fieldConfig"]["defaults"])["unit"]


@BOARDS
def test_panels_fill_the_grid_without_overlap(board: dict[str, Any]) -> None:
    taken: dict[tuple[int, int], int] = {}
    for panel in board["panels"]:
        at = panel["gridPos"]
        for field in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            assert field not in taken, (panel["title"], taken[field])
            taken[field] = panel["id"]
    height = 1 + max(y for _, y in taken)
    assert set(taken) == {(x, y) for x in range(COLUMNS) for y in range(height)}


@BOARDS
def test_dashboards_have_unique_ids_and_link_to_each_other(board: dict[str, Any]) -> None:
    identities = [panel["id"] for panel in board["panels"]]
    assert len(set(identities)) == len(identities)
    others = {f"/d/{other['uid']}" for other in DASHBOARDS.values() if other is not board}
    assert {link["url"] for link in board["links"]} == others
    assert {"id", "__inputs", "__requires", "iteration"}.isdisjoint(board)  # leftovers of an export


def test_panels_show_all_metrics_and_no_unknown_ones() -> None:
    shown = {name for _, panel in PANELS for target in panel["targets"] for name in metrics_in(target["expr"])}
    assert shown == known_metrics()
    assert {name for rule in RULES for name in metrics_in(rule["expr"])} <= known_metrics()


def test_rules_follow_the_rules_that_they_use() -> None:
    recorded: set[str] = set()
    for rule in RULES:
        assert set(re.findall(r"\boutrider:[\w:]+", rule["expr"])) <= recorded
        recorded |= {rule["record"]} if "record" in rule else set()


def test_alerts_have_severity_summary_and_description() -> None:
    for rule in (rule for rule in RULES if "alert" in rule):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert {"summary", "description"} == set(rule["annotations"])
        assert all(text.endswith(".") for text in rule["annotations"].values())
    text = " ".join(rule["annotations"]["description"] for rule in RULES if "alert" in rule)
    titles = {panel["title"] for _, panel in PANELS}
    assert set(re.findall(r'"([^"]+)"', text)) <= titles  # the referenced panels


def test_the_queue_alert_matches_the_default_bound() -> None:
    rule = next(rule for rule in RULES if rule.get("alert") == "OutriderQueueNearlyFull")
    assert rule["expr"] == f"outrider_requests_waiting > {Scheduling().max_waiting * 3 // 4}"


def test_grafanas_interval_is_the_scrape_interval() -> None:
    """The dashboards' $__rate_interval depends on it; if it is too short, panels have gaps."""
    sources = yaml.safe_load((DOCKER / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert [source["jsonData"]["timeInterval"] for source in sources] == [scraped]
