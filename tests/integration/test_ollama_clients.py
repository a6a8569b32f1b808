"""Ollama's own clients, and its provider for the AI SDK, with running servers.

One server replays recorded answers beside an encoder; the other one's answers are its model's.
"""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.grammars import record
from tests.integration.api.replaying import ARGUMENTS, CALL_TEXT, FINAL_TEXT, PROGRAM, THOUGHT, long_model
from tests.server.encoders.encoders import DIMENSIONS, save_all
from tests.servers import COST_FOLDER, Served, serving, wait_for_metric, wait_until

ollama: Any = pytest.importorskip("ollama", reason="needs the extra `clients`")
pytestmark = pytest.mark.clients

PACKAGES = ("ollama@0.6", "ollama-ai-provider-v2@4", "ai@7", "zod@4")
SCHEMA = record(yes={"type": "boolean"})
QUESTION = [{"role": "user", "content": "Write the file proof.txt."}]
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "bash", "description": "Runs a command.", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two models, `long` and the encoder `static`."""
    folder = tmp_path_factory.mktemp("several")
    save_all(folder)
    paths = [str(long_model(folder)), str(folder / "static")]
    flags = ["--models.paths", json.dumps(paths), "--model.dtype", "float32", "--speculation.max_nodes", "8"]
    with serving(*flags, program=PROGRAM) as server:
        yield server


@pytest.fixture
def client(replaying: Served) -> Iterator[Any]:
    with ollama.Client(host=replaying.url) as client:
        yield client


def test_models_are_listed_shown_loaded_and_unloaded(client: Any) -> None:
    assert [each.model for each in client.list().models] == ["long:latest", "static:latest"]
    shown = client.show("long")
    assert "completion" in shown.capabilities and "vision" not in shown.capabilities
    assert shown.modelinfo[f"{shown.modelinfo['general.architecture']}.context_length"] == 16_384
    assert client.generate("long", keep_alive="5m").done_reason == "load"
    assert [each.size > 0 for each in client.ps().models if each.model == "long:latest"] == [True]
    assert client.generate("long", keep_alive=0).done_reason == "unload"
    wait_until(lambda: all(each.model != "long:latest" for each in client.ps().models))


def test_an_agents_loop(client: Any) -> None:
    messages: list[Any] = [*QUESTION]
    answer = client.chat("long", messages, tools=[TOOL], options={"temperature": 0})
    [call] = answer.message.tool_calls
    assert (answer.message.content, call.function.name, dict(call.function.arguments)) == (CALL_TEXT, "bash", ARGUMENTS)
    messages += [answer.message, {"role": "tool", "tool_name": "bash", "content": "the tool ran"}]
    parts = [*client.chat("long", messages, tools=[TOOL], stream=True)]
    assert "".join(part.message.content for part in parts) == FINAL_TEXT and len(parts) > 2
    assert parts[-1].done_reason == "stop" and parts[-1].eval_count > 0 and parts[-1].total_duration > 0


def test_thinking_is_apart_from_the_answer(client: Any) -> None:
    answer = client.chat("long", QUESTION, think=True)
    assert (answer.message.thinking, answer.message.content) == (THOUGHT, FINAL_TEXT)
    assert client.chat("long", QUESTION, think=False).message.thinking is None
    assert client.generate("long", "Write the file.", think=True).thinking == THOUGHT


def test_embeddings(client: Any) -> None:
    vectors = client.embed("static", ["a", "b c"]).embeddings
    assert [len(vector) for vector in vectors] == [DIMENSIONS] * 2
    assert list(client.embeddings("static", "a").embedding) == pytest.approx(list(vectors[0]))
    with pytest.raises(ollama.ResponseError, match="embedding"):
        client.embed("long", "a")


def test_pictures_for_a_model_of_text_are_named(client: Any, replaying: Served) -> None:
    message = {"role": "user", "content": "What is it?", "images": [b"\x89PNG"]}
    assert client.chat("long", [message]).message.content == FINAL_TEXT
    body = {"model": "long", "messages": [{**message, "images": ["iVBORw0="]}], "stream": False}
    assert replaying.http.post("/api/chat", json=body).headers["x-outrider-ignored"] == "messages.image"


def test_a_schema_an_abort_and_options(served: Served) -> None:
    with ollama.Client(host=served.url) as own:
        assert isinstance(json.loads(own.chat(served.model, QUESTION, format=SCHEMA).message.content)["yes"], bool)
        options = {"seed": 7, "num_predict": 5, "num_ctx": 2048}
        first, again = (own.generate(served.model, "def f", raw=True, options=options) for _ in range(2))
        assert first.response == again.response and (first.eval_count, first.done_reason) == (5, "length")
        stream = own.generate(served.model, "def f", raw=True, stream=True, options={"num_predict": -1, "seed": 1})
        assert next(part.response for part in stream if part.response)
        stream.close()
    wait_for_metric(served, "outrider_requests_running 0.0")


def test_refusals_are_the_clients_errors(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="'other' does not exist") as unknown:
        client.chat("other", QUESTION)
    assert unknown.value.status_code == 404
    assert [each.status for each in client.pull("long", stream=True)][-1] == "success"
    with pytest.raises(ollama.ResponseError, match="outrider pull"):
        client.pull("other")
    with pytest.raises(ollama.ResponseError, match="outrider remove"):
        client.delete("long")
    with pytest.raises(ollama.ResponseError, match="options"):
        client.chat("long", QUESTION, options={"temperature": -1})


@pytest.mark.skipif(shutil.which("npm") is None, reason="needs node with npm")
@pytest.mark.parametrize("name", ["ollama", "ollama-ai-provider-v2"])
def test_clients_in_javascript(replaying: Served, served: Served, name: str) -> None:
    folder = COST_FOLDER / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / name).exists():
        command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *PACKAGES]
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            pytest.skip(f"npm installs nothing: {installed.stderr[-300:]}")
    wanted = {"call": CALL_TEXT, "final": FINAL_TEXT, "thought": THOUGHT, "command": ARGUMENTS["command"], "tool": TOOL}
    arguments = [name, replaying.url, served.url, served.model, json.dumps({**wanted, "schema": SCHEMA})]
    command = ["node", "--input-type=module", "-", *arguments]
    script = Path(__file__).with_suffix(".mjs").read_text()
    done = subprocess.run(command, input=script, cwd=folder, capture_output=True, text=True, timeout=200)
    assert (done.stdout.strip(), done.returncode) == (f"{name} passed", 0), done.stderr
