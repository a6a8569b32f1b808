"""The dashboards and rules: a real Prometheus scrapes a real server under load and evaluates all their expressions."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.docker.dashboards import DASHBOARDS, DOCKER, PANELS, RULES
from tests.requests import ENDLESS
from tests.servers import Served, serving, worker_of

pytestmark = pytest.mark.slow  # a server, a Prometheus and half a minute of load

QUERIES = [
    pytest.param(target, id=f"{name}: {panel['title']} {target['refId']}")
    for name, panel in PANELS
    for target in panel["targets"]
]
RECORDED = [rule for rule in RULES if "record" in rule]
ALERTS = [rule for rule in RULES if "alert" in rule]
VARIABLES = {
    "$__rate_interval": "5m",
    "$__range": "5m",
    "$instance": ".*",
    "$replica": ".*",
}  # as Grafana would substitute them
WAIT_SECONDS = 60.0
FLAGS = ("--scheduling.max_waiting", "1", "--scheduling.max_active", "1", "--server.read_seconds", "1")
SCRAPE_SECONDS = 0.5
STEP_SECONDS = SCRAPE_SECONDS / 2  # between the points of a query; shorter than a scrape interval
# These expressions hold once Prometheus has scraped all effects of the load and evaluated the rules.
LOADED = (
    'sum(rate(outrider_requests_total{status="404"}[5m])) > 0',
    'sum(rate(outrider_requests_total{status="503", endpoint="/v1/completions"}[5m])) > 0',
    'sum(rate(outrider_rejected_requests_total{reason="queue_full"}[5m])) > 0',
    "max_over_time(outrider_requests_waiting[5m]) > 0",
    "increase(outrider_worker_restarts_total[5m]) > 0",
    "outrider:refusals:rate5m > 0",
    "outrider:cached_prompt_tokens:ratio > 0",
)


@dataclass
class Observed:
    """A server that has been under load, and the Prometheus that scraped it."""

    served: Served
    prometheus: httpx.Client
    started: float  # Unix time of Prometheus' start

    def query(self, path: str, **parameters: Any) -> Any:
        """The data of a response of Prometheus' API."""
        response = self.prometheus.get(f"/api/v1/{path}", params=parameters)
        assert response.status_code == 200, response.text
        return response.json()["data"]

    def instant(self, expression: str) -> list[float]:
        """The current finite values of an expression."""
        found = self.query("query", query=expression)["result"]
        return [float(series["value"][1]) for series in found if math.isfinite(float(series["value"][1]))]

    def over_time(self, expression: str) -> list[float]:
        """All finite values of an expression since the start."""
        end = time.time() + STEP_SECONDS  # includes the last scrape
        found = self.query("query_range", query=expression, start=self.started, end=end, step=STEP_SECONDS)["result"]
        values = (float(value) for series in found for _, value in series["values"])
        return [value for value in values if math.isfinite(value)]

    def label_values(self, variable: dict[str, Any]) -> list[str]:
        """The values that a dashboard's variable offers, whose query is `label_values(metric, label)`."""
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", substituted(variable["query"]["query"]))
        assert query is not None
        values: list[str] = self.query(f"label/{query[2]}/values", **{"match[]": query[1]})
        return values

    def wait_for(self, condition: str) -> None:
        """Waits until an expression has a result."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.instant(condition):
            assert time.monotonic() < deadline, f"no result within {WAIT_SECONDS:g} s: {condition}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `prometheus` and `promtool`: installed ones, or unpacked from Debian's package."""
    found = shutil.which("prometheus")
    if found and shutil.which("promtool"):
        return Path(found).parent
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
    return folder / "usr" / "bin"


@contextmanager
def scraping(tools: Path, server: str, folder: Path) -> Iterator[httpx.Client]:
    """A Prometheus with the configuration of docker/, but short intervals and `server` as its target."""
    config = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_SECONDS * 1000:.0f}ms", "evaluation_interval": "1s"}
    config["rule_files"] = [str(DOCKER / name) for name in config["rule_files"]]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [server]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [str(tools / "prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log, httpx.Client(base_url=f"http://{address}") as client:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
        try:
            wait_listening(client, process, folder / "log")
            yield client
        finally:
            process.terminate()
            process.wait(20)


def wait_listening(client: httpx.Client, process: subprocess.Popen[bytes], log: Path) -> None:
    """Waits until Prometheus is ready."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)


def complete(served: Served, **fields: Any) -> int:
    """Sends a completion request and returns the status."""
    body = {"model": served.model, "prompt": "def add(a, b):", "max_tokens": 2} | fields
    return served.http.post("/v1/completions", json=body).status_code


def stream(served: Served, drafter: str) -> None:
    """Streams a chat in the session `s`."""
    common: Any = {"model": served.model, "stream": True, "max_tokens": 120, "temperature": 0}
    extra = {"session_id": "s", "ignore_eos": True, "speculation": {"drafter": drafter}}
    messages: Any = [{"role": "user", "content": "Write a function that reads a file."}]
    assert list(served.client.chat.completions.create(**common, messages=messages, extra_body=extra))


def serve_and_refuse(served: Served) -> None:
    """Posts a corpus, and sends requests for several drafters, invalid requests, and half a request."""
    corpus = {"name": "files", "texts": ["def read(path):\n    return path.read_text()\n"]}
    assert served.http.post("/v1/outrider/corpora", json=corpus).status_code == 200
    for drafter in ("fusion", "trigram", "lookup", "lookahead", "none"):
        stream(served, drafter)
    assert complete(served, temperature=-1) == 400
    assert complete(served, model="another") == 404
    assert served.http.get("/nothing").status_code == 404
    parts = urlsplit(served.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(b"POST /v1/comp")
        assert connection.recv(1) == b""  # the server has waited long enough


def fill_the_queue(observed: Observed) -> None:
    """One running, one queued and one refused request; the first two last until Prometheus has scraped them."""
    served = observed.served
    with ThreadPoolExecutor() as pool:
        body = {"model": served.model, "prompt": "x", "stream": True} | ENDLESS
        with served.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()  # a reference: without it, the response would be closed
            next(lines)
            waiting = pool.submit(complete, served)
            observed.wait_for("outrider_requests_waiting > 0")
            assert complete(served) == 429
        assert waiting.result(WAIT_SECONDS) == 200


def lose_the_worker(observed: Observed) -> None:
    """Kills the worker during a request."""
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(complete, observed.served, **ENDLESS)
        observed.wait_for("outrider_requests_running > 0")
        os.kill(worker_of(observed.served), signal.SIGKILL)
        assert lost.result(WAIT_SECONDS) == 503


@pytest.fixture(scope="module")
def observed(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    with serving("--model.dtype", "float32", *FLAGS) as served:
        started = time.time()
        with scraping(tools, served.url.removeprefix("http://"), folder) as client:
            found = Observed(served, client, started)
            found.wait_for('up{job="outrider"} == 1')
            serve_and_refuse(served)
            found.wait_for('outrider_requests_total{status="404"} > 0')  # a rate needs two scrapes of the series
            serve_and_refuse(served)
            fill_the_queue(found)
            lose_the_worker(found)
            for condition in LOADED:
                found.wait_for(condition)
            yield found


def substituted(expression: str) -> str:
    """The expression with Grafana's variables substituted."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert "$" not in expression
    return expression


@pytest.mark.parametrize("target", QUERIES)
def test_no_panel_is_empty(observed: Observed, target: dict[str, Any]) -> None:
    expression = substituted(target["expr"])
    values = observed.instant(expression) if target.get("instant") else observed.over_time(expression)
    assert any(values), "nothing" if not values else "nothing but zeros"


@pytest.mark.parametrize("board", DASHBOARDS.values(), ids=list(DASHBOARDS))
def test_variables_and_annotations_have_data(observed: Observed, board: dict[str, Any]) -> None:
    source, servers, replicas = board["templating"]["list"]
    assert (source["name"], source["type"]) == ("datasource", "datasource")
    assert observed.label_values(servers) == [observed.served.url.removeprefix("http://")]
    assert observed.label_values(replicas) == []  # only the replicas of a Ray cluster have this label
    for annotation in board["annotations"]["list"]:
        assert observed.over_time(substituted(annotation["expr"]))


@pytest.mark.parametrize("rule", RECORDED, ids=lambda rule: rule["record"])
def test_recording_rules_have_data(observed: Observed, rule: dict[str, Any]) -> None:
    assert observed.instant(rule["expr"])
    assert observed.over_time(rule["record"])


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_the_operands_of_alerts_have_data(observed: Observed, rule: dict[str, Any]) -> None:
    """The expression holds only while the alert fires; its operands must always have data."""
    observed.instant(rule["expr"])
    for side in re.split(r"\s+(?:and|or|unless)\s+", rule["expr"]):
        compared, comparisons = re.subn(r"\s*(?:==|!=|[<>]=?)\s*[\d.]+$", "", side)
        assert comparisons == 1
        assert observed.instant(compared)


def test_prometheus_evaluates_all_rules(observed: Observed) -> None:
    groups = observed.query("rules")["groups"]
    health = {rule["name"]: (rule["health"], rule.get("lastError")) for group in groups for rule in group["rules"]}
    assert health == {rule.get("record") or rule["alert"]: ("ok", None) for rule in RULES}


def test_a_restart_fires_an_alert(observed: Observed) -> None:
    firing = 'ALERTS{alertname="OutriderWorkerRestarted", alertstate="firing"}'
    observed.wait_for(firing)
    assert observed.instant(firing)


@pytest.mark.parametrize(
    "command",
    [
        ["check", "config", str(DOCKER / "prometheus.yml")],
        ["check", "rules", str(DOCKER / "rules.yml")],
        ["test", "rules", str(Path(__file__).parent / "alerts.yml")],
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_configuration(tools: Path, command: list[str]) -> None:
    done = subprocess.run([tools / "promtool", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_metrics(tools: Path, observed: Observed) -> None:
    text = observed.served.http.get("/metrics").text
    done = subprocess.run([tools / "promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
