"""The bench's commands and flags; measuring clients, which time and count by chunks; and the processes of a server."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from bench.cli import register
from bench.http.chat import ask, read
from bench.http.load import stream
from bench.http.process import start
from bench.plan import BenchError

Handler = Callable[[httpx.Request], httpx.Response]


def client(handler: Handler) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handler))


def events(*chunks: dict[str, Any]) -> Handler:
    lines = [": comment", *(f"data: {json.dumps(chunk)}" for chunk in chunks), "data: [DONE]"]
    return lambda request: httpx.Response(200, text="\n\n".join(lines) + "\n\n")


def tokens(*ids: int) -> dict[str, Any]:
    return {"choices": [{"token_ids": list(ids)}]}


def test_a_stream_is_timed_by_packet() -> None:
    outcome = asyncio.run(stream(client(events(tokens(1, 2), tokens(3), {"choices": []})), {}))
    assert outcome.answered
    assert outcome.tokens == [1, 2, 3]
    assert len(outcome.gaps) == 2
    assert 0 < outcome.first_token <= outcome.seconds


def test_an_error_in_the_stream_is_recorded() -> None:
    outcome = asyncio.run(stream(client(events(tokens(1), {"error": {"message": "the worker was replaced"}})), {}))
    assert (outcome.status, outcome.error, outcome.answered) == (200, "the worker was replaced", False)


def test_refusals_and_lost_connections_are_outcomes() -> None:
    refused = asyncio.run(stream(client(lambda request: httpx.Response(429, json={})), {}))
    assert (refused.status, refused.answered) == (429, False)

    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    lost = asyncio.run(stream(client(lose), {}))
    assert (lost.status, lost.error, lost.answered) == (0, "ConnectError", False)


def piece(**chunk: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [], **chunk}).encode() + b"\n\n"


def delta(content: str | None, ids: list[int] | None = None) -> dict[str, Any]:
    return {"delta": {"content": content}} | ({"token_ids": ids} if ids else {})


USAGE = {"completion_tokens": 5, "prompt_tokens": 9}


def test_outriders_stream() -> None:
    last = piece(usage=USAGE, speculation={"steps": 3})
    arrived = [
        (0.1, piece(choices=[delta("")])),  # the role
        (0.2, piece(choices=[delta("a", [7])])[:12]),
        (0.3, piece(choices=[delta("a", [7])])[12:] + piece(choices=[delta("bcd", [8, 9, 10])])),
        (0.5, piece(choices=[delta(None, [2])]) + last + b"data: [DONE]\n\n"),
    ]
    answer = read(arrived)
    assert (answer.tokens, answer.steps, answer.text) == (5, 3, "abcd")
    assert (answer.first_token_seconds, answer.seconds) == (0.3, 0.5)


def test_llama_servers_steps_are_the_tokens_that_were_not_drafted() -> None:
    arrived = [(0.1, piece(choices=[delta("a")])), (0.2, piece(usage=USAGE, timings={"draft_n": 8, "draft_n_accepted": 2}))]
    answer = read(arrived)
    assert (answer.tokens, answer.steps) == (5, 3)


def test_reasoning_and_calls_of_tools_are_text() -> None:
    call = {"index": 0, "function": {"name": "read", "arguments": "{}"}}
    deltas = [{"reasoning_content": "Hm.", "content": None}, {"tool_calls": [call]}]
    arrived = [(0.1, b"".join(piece(choices=[{"delta": each}]) for each in deltas)), (0.2, piece(usage=USAGE))]
    answer = read(arrived)
    assert (answer.text, answer.steps) == ("Hm.read{}", None)


def test_an_answer_of_the_end_token_alone_has_its_first_token_at_the_end() -> None:
    usage = {"completion_tokens": 1, "prompt_tokens": 9}
    assert read([(0.1, piece(choices=[delta("")])), (0.4, piece(usage=usage))]).first_token_seconds == 0.4


def test_what_is_no_answer_is_reported() -> None:
    with pytest.raises(BenchError, match="an error: lost"):
        read([(0.1, piece(error={"message": "lost"}))])
    with pytest.raises(BenchError, match="without its usage"):
        read([(0.1, b"data: [DONE]\n\n")])
    client = httpx.Client(
        base_url="http://server", transport=httpx.MockTransport(lambda _: httpx.Response(503, text="loading"))
    )
    with pytest.raises(BenchError, match="503: loading"):
        ask(client, {})


def test_a_server_that_ends_is_reported_with_its_last_line() -> None:
    failing = start(["json.tool"], "/health")  # does not know --port
    with pytest.raises(BenchError, match=r"json\.tool did not start: .*error: argument infile"), failing:
        pass


def test_a_server_answers_and_ends() -> None:
    with start(["uvicorn", "fastapi:FastAPI", "--factory"], "/docs") as server:
        assert server.client.get("/docs").status_code == 200
        assert any("/docs" in line for line in server.log)
    assert server.process.wait(0) is not None


app = typer.Typer()
register(app)


def test_the_entry_point_adds_the_commands() -> None:
    listed = CliRunner().invoke(app, ["--help"]).output
    assert "bench" in listed
    assert "verify-lossless" in listed and "verify-quality" in listed
    commands = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in commands for name in ("decode", "gpu", "live", "replay", "serve"))


def test_nothing_heavy_is_imported_with_the_commands() -> None:
    heavy = "import bench.cli, sys; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["verify-lossless", "--drafter", "magic"], "no drafter magic"),
        (["bench", "decode", "--temperature", "warm"], "--temperature takes numbers"),
        (["bench", "decode", "--model.no_such", "1"], "model.no_such"),
        (["bench", "live", "--prompts", "no-such-file"], "Cannot read questions from no-such-file"),
        (["bench", "replay", "--stream", "x", "--tokenizer", "x", "--nodes", "many"], "--nodes takes whole numbers"),
        (["bench", "serve", "--rate", "0"], "--rate takes numbers above 0"),
        (["bench", "serve", "--concurrency", "1.5"], "--concurrency takes whole numbers"),
    ],
)
def test_user_errors_are_one_sentence(arguments: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1
