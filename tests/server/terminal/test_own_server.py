"""A chat's own server: it says why it cannot start, and ends with the chat."""

import signal
from contextlib import closing
from pathlib import Path

import pytest

from outrider.server.settings.access import Auth
from outrider.server.terminal.client import ChatError
from outrider.server.terminal.own_server import OwnServer, private_settings


@pytest.mark.slow
def test_a_server_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"model.path": "/no/such/folder"}
    with closing(OwnServer(None, flags)) as server, pytest.raises(ChatError, match=r"^$"):
        server.wait_until_ready()
    errors = capsys.readouterr().err
    assert errors.startswith("outrider: There is no folder '/no/such/folder'")
    assert errors.count("\n") == 1


def test_a_server_ends_with_its_chat_and_is_not_killed() -> None:
    with closing(OwnServer(None, {})) as server:
        server.check()
    with pytest.raises(ChatError, match=r"^$"):
        server.check()
    assert server.close() in (0, -signal.SIGTERM)  # the latter if it was still starting


def test_the_chats_key_is_the_only_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_AUTH__KEYS", '{"other": "other-key"}')
    (tmp_path / "keys.yaml").write_text("further: further-key\n")
    config = tmp_path / "settings.yaml"
    config.write_text(f"auth:\n  file: {tmp_path / 'keys.yaml'}\n  max_concurrent: 1\n  keys: {{alice: alice-key}}\n")
    settings = private_settings(
        config, {"auth.keys.bob": "bob-the-key", "server.port": 80, "model.dtype": "float32"}, "the-chats-key"
    )
    assert settings.auth == Auth.model_validate({"keys": {"chat": "the-chats-key"}})
    assert (settings.server.host, settings.server.port, settings.model.dtype) == ("127.0.0.1", 0, "float32")
