"""`outrider status`: the figures of one model and of several, what keys are needed for, and errors in one sentence."""

import json
from collections.abc import Iterator, Mapping

import pytest
from prometheus_client import generate_latest
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.engine.messages import StepReport
from outrider.server.http.exposition import merged
from outrider.server.telemetry.metrics import Metrics
from outrider.server.terminal.client import Client
from outrider.server.terminal.figures import Reading, figures, parse, read
from tests.stand_in import answering

MEMORY = {"file": 98_000_000, "weights": 96_000_000, "caches": 7_500_000_000, "rest": 70_000_000}
PAGES = {
    "/version": (200, json.dumps({"version": "1.2", "memory": MEMORY})),
    "/ready": (200, '{"status": "ready"}'),
    "/v1/models": (200, json.dumps({"data": [{"id": "tiny\x1b[2J", "max_model_len": 2048}, {"id": "alias"}]})),
}


def text_of(tokens: list[int]) -> bytes:
    """The metrics of a server whose steps emitted these numbers of tokens."""
    metrics = Metrics()
    for count in tokens:
        metrics.record_step(StepReport(0.1, 0.1, 0.1, {}, {}), count)
    metrics.prompt_tokens.inc(200)
    metrics.cached_prompt_tokens.inc(50)
    metrics.running.set(3)
    metrics.waiting.set(2)
    return generate_latest(metrics.registry)


def reading(seconds: float, text: bytes, *cards: Mapping[str, object]) -> Reading:
    return Reading(seconds, {}, "ready", cards, parse(text.decode()), [])


def test_rates_are_those_between_two_readings() -> None:
    card = {"id": "tiny"}
    (model,) = figures("", reading(12.0, text_of([3, 1, 6]), card), reading(10.0, text_of([3]), card)).models
    assert (model.running, model.waiting, model.tokens_per_second) == (3, 2, 3.5)
    assert model.tokens_per_step == pytest.approx(10 / 3) and model.reused == 0.25
    (model,) = figures("", reading(12.0, text_of([1]), card), reading(10.0, text_of([3]), card)).models
    assert model.tokens_per_second == 0  # the worker was restarted


def test_each_of_several_models_has_its_figures_and_adapters_have_none() -> None:
    text = merged([("", text_of([])), ("a", text_of([4]))], "model")
    loaded, unloaded = {"id": "a", "status": {"value": "loaded"}}, {"id": "b", "status": {"value": "unloaded"}}
    first, second = figures("", reading(1.0, text, loaded, {**loaded, "id": "c", "parent": "a"}, unloaded)).models
    assert (first.name, first.state, first.running, first.tokens_per_step) == ("a", "loaded", 3, 4)
    assert (second.name, second.state, second.running, second.tokens_per_step) == ("b", "unloaded", None, None)


@pytest.fixture
def server() -> Iterator[str]:
    with answering({**PAGES, "/metrics": (200, text_of([2, 4]).decode())}) as url:
        yield url


def status(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["status", *arguments, "--interval", "0.05"], env={"COLUMNS": "80"})
    return done.exit_code, done.stdout, done.stderr


def test_the_table_fits_eighty_columns(server: str) -> None:
    code, shown, _ = status(server, "--once")
    assert code == 0 and max(map(len, shown.splitlines())) <= 80
    assert "file 98 MB, weights 96 MB, caches up to 7500 MB, rest 70 MB" in shown
    assert shown.splitlines()[-1].split() == ["tiny[2J", "ready", "3", "2", "0.0", "3.00", "25%", "0%"]


def test_scripts_get_json(server: str) -> None:
    found = json.loads(status(server, "--json")[1])
    assert found["version"] == "1.2" and found["memory"] == MEMORY and found["notes"] == []
    (model,) = found["models"]
    assert (model["name"], model["state"], model["context_tokens"], model["running"]) == ("tiny[2J", "ready", 2048, 3)


def test_the_exit_code_is_that_of_a_health_check() -> None:
    for state, expected in (("loading", 0), ("failed", 2)):
        with answering({**PAGES, "/ready": (503, json.dumps({"status": state}))}) as url:
            code, shown, _ = status(url, "--once")
            assert (code, state in shown) == (expected, True)


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ((401, "{}"), "give it with --metrics-key"),
        ((404, "{}"), "give that address with --metrics-url"),
        ((403, '{"error": {"message": "Set metrics.key."}}'), "Set metrics.key."),
        ((200, "<html>"), "not Outrider's"),
    ],
)
def test_missing_figures_are_explained(answer: tuple[int, str], note: str) -> None:
    with answering({**PAGES, "/metrics": answer}) as url:
        code, shown, _ = status(url, "--once")
    assert code == 0 and note in " ".join(shown.split()) and "tiny" in shown


@pytest.mark.parametrize(
    "text", ["outrider_requests_running NaN", "outrider_requests_running +Inf", "# TYPE", "outrider_x{", "\0"]
)
@pytest.mark.parametrize("card", [{"status": "loaded"}, {"status": None}, {"max_model_len": "much"}, {"max_model_len": -1}])
def test_odd_answers_of_other_servers_are_no_figures(text: str, card: dict[str, object]) -> None:
    pages = {**PAGES, "/v1/models": (200, json.dumps({"data": [{"id": "x", **card}]})), "/metrics": (200, text)}
    with answering(pages) as url:
        (model,) = json.loads(status(url, "--json")[1])["models"]
    assert (model["name"], model["running"]) == ("x", None)


def test_metrics_may_have_another_address_and_key(server: str) -> None:
    keys: list[str | None] = []
    with answering({"/metrics": (200, text_of([7]).decode())}, keys) as metrics_url:
        found = read(Client(server, "mine"), Client(metrics_url, "theirs"))
    assert figures("", found).models[0].tokens_per_step == 7 and keys == ["Bearer theirs"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:1", "No server answers at http://127.0.0.1:1; start one"),
        ("nowhere", "is not the address of a server"),
    ],
)
def test_errors_are_one_sentence(url: str, words: str) -> None:
    code, _, error = status(url)
    assert code == 2 and words in error and error.count("\n") == 1
