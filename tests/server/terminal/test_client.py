"""The chat's HTTP client: addresses, keys, streams; and errors of client and command that are one sentence."""

import json
import signal

import pytest
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.terminal import command
from outrider.server.terminal.client import ChatError, Client
from tests.stand_in import answering

MODELS = (200, json.dumps({"data": [{"id": "tiny"}]}))


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_the_address_may_end_with_the_version(suffix: str) -> None:
    keys: list[str | None] = []
    with answering({"/v1/models": MODELS}, keys) as url:
        assert Client(url + suffix, "secret").model() == "tiny"
        assert Client(url + suffix).model() == "tiny"
    assert keys == ["Bearer secret", None]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, "<html>"), "names no model"),
        ((401, '{"error": {"message": "The API key is wrong."}}'), "needs an API key that it knows; give it with --api-key"),
        ((429, '{"error": {"message": "Too many."}}'), r"^Too many\.$"),
        ((400, '{"error": {"message": "a\\u001b[2Jb\\nc"}}'), r"^a\[2Jb c$"),
        ((502, "<html>"), "answered with status 502"),
    ],
)
def test_an_error_is_one_sentence(answer: tuple[int, str], message: str) -> None:
    with answering({"/v1/models": answer}) as url, pytest.raises(ChatError, match=message):
        Client(url).model()


def test_an_error_in_the_stream_is_raised() -> None:
    stream = ': keep-alive\n\ndata: {"a": 1}\n\ndata: {"error": {"message": "The worker was lost."}}\n\ndata: [DONE]\n\n'
    with answering({"/v1/chat/completions": (200, stream)}) as url:
        chunks = Client(url).stream({})
        assert next(chunks) == {"a": 1}
        with pytest.raises(ChatError, match=r"^The worker was lost\.$"):
            next(chunks)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"error": "It broke."}', r"^It broke\.$"),
        ('{"choices": ', "no part of a chat completion"),
        ('{"a": ' * 100_000, "no part of a chat completion"),
    ],
    ids=["a text", "no JSON", "nesting"],
)
def test_an_event_that_is_no_chunk_is_one_sentence(line: str, message: str) -> None:
    with answering({"/v1/chat/completions": (200, f"data: {line}\n\n")}) as url, pytest.raises(ChatError, match=message):
        next(Client(url).stream({}))


@pytest.fixture(autouse=True)
def keep_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "No server answers at http://127.0.0.1:1; start one with `outrider serve`"),
        (["--url", "nowhere"], "is not the address of a server"),
        (["--model.dtype", "float32"], "give it a --model"),
        (["--config", "x.yaml"], "give it a --model"),
        (["--model", "m", "--model.dtipe", "float32"], "did you mean model.dtype?"),
        (["--model", "m", "--dtype", "float32"], "is not a flag"),
    ],
)
def test_errors_are_one_sentence(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["chat", *arguments])
    assert done.exit_code == 2
    assert words in done.stderr
    assert done.stderr.startswith("outrider: ") and done.stderr.count("\n") == 1


def test_a_key_of_the_environment_is_sent_only_to_a_server_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may listen at the default address."""
    monkeypatch.setenv("OPENAI_API_KEY", "a-real-key")
    clients: list[tuple[str, str | None]] = []

    def refuse(url: str, key: str | None) -> None:
        clients.append((url, key))
        raise ChatError("enough")

    monkeypatch.setattr("outrider.server.terminal.client.Client", refuse)
    for arguments in ([], ["--url", "http://10.0.0.1"], ["--api-key", "own"]):
        CliRunner().invoke(app, ["chat", *arguments])
    assert clients == [(command.URL, None), ("http://10.0.0.1", "a-real-key"), (command.URL, "own")]
