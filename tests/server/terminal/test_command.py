"""`outrider chat`: errors before the chat starts are one sentence and exit code 2."""

import signal

import pytest
from typer.testing import CliRunner

from outrider.server.cli import app
from outrider.server.terminal import command
from outrider.server.terminal.client import ChatError


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
