"""`outrider serve` with several models: real workers, loaded by name and unloaded when idle."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider import models
from tests.servers import Served, children, resident_mb, serving, wait_until

pytestmark = pytest.mark.slow  # workers start, and are waited for until they end

QUESTION = [{"role": "user", "content": "Write a function that reads a file."}]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("one", "two", "broken"):
        (folder / name).symlink_to(models.TARGET)
    (folder / "broken").unlink()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text('{"model_type": "nothing"}')
    shutil.copytree(models.TARGET, folder / "damaged")
    config = json.loads((models.TARGET / "config.json").read_text())
    (folder / "damaged" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**6}))
    paths = json.dumps([str(folder)])
    with serving("--model.dtype", "float32", "--models.paths", paths, "--models.idle_seconds", "5") as served:
        yield served


def chat(served: Served, model: str, **fields: Any) -> Any:
    body = {"model": model, "messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}
    return served.http.post("/v1/chat/completions", json=body)


def statuses(served: Served) -> dict[str, str]:
    cards = served.http.get("/v1/models").json()["data"]
    return {card["id"]: card["status"]["value"] for card in cards}


def workers(served: Served) -> int:
    commands = [Path(f"/proc/{child}/cmdline") for child in children(served.process.pid)]
    return sum(b"server.worker.main" in command.read_bytes() for command in commands if command.exists())


def test_a_model_is_loaded_by_name_and_unloaded_when_idle_and_keeps_its_sessions(several: Served) -> None:
    assert statuses(several) == {"broken": "unloaded", "damaged": "unloaded", "one": "unloaded", "two": "unloaded"}
    first = chat(several, "one", session_id="s").json()
    assert statuses(several) == {"broken": "unloaded", "damaged": "unloaded", "one": "loaded", "two": "unloaded"}
    second = chat(several, "two").json()
    assert statuses(several)["two"] == "loaded"
    assert (first["model"], second["model"]) == ("one", "two")
    assert first["choices"][0]["message"]["content"] == second["choices"][0]["message"]["content"]
    assert several.http.get("/v1/models/one").json()["context_length"] > 0
    wait_until(lambda: set(statuses(several).values()) == {"unloaded"})
    wait_until(lambda: workers(several) == 0)
    again = chat(several, "one", session_id="s").json()
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_stream_has_comments_while_its_model_is_loaded(several: Served) -> None:
    wait_until(lambda: statuses(several)["two"] == "unloaded")
    body = {"model": "two", "messages": QUESTION, "max_tokens": 8, "stream": True}
    with several.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[0] == ": loading two, 0 s"
    events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]" and json.loads(events[0][6:])["model"] == "two"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("model", "reason"), [("broken", "does not load ("), ("damaged", "says that it has 1000000 layers")])
def test_a_model_that_cannot_be_loaded_fails_its_own_requests(several: Served, path: str, model: str, reason: str) -> None:
    body = {"model": model, "messages": QUESTION, "max_tokens": 8}
    response = several.http.post(path, json=body)
    assert response.status_code in (503, 529) and reason in response.json()["error"]["message"]
    with several.http.stream("POST", path, json=body | {"stream": True}) as streamed:
        event = [line for line in streamed.iter_lines() if line.startswith("data: ")][-1]
    assert json.loads(event[6:])["error"]["message"] == response.json()["error"]["message"]
    assert chat(several, "one").status_code == 200


def test_memory_of_unloaded_models_is_returned(several: Served) -> None:
    wait_until(lambda: workers(several) == 0)
    resident = resident_mb(several.process.pid)
    for _ in range(2):
        assert chat(several, "one").status_code == chat(several, "two").status_code == 200
        wait_until(lambda: workers(several) == 0)
    assert resident_mb(several.process.pid) < 1.3 * resident
