"""Fixtures of the benchmarks' tests: exact settings, and the output of a command in 80 columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from server.settings import Settings, load_settings

WIDTH = 80


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The embedded model in float32 on one thread, where drafted answers equal plain decoding."""
    costs = str(tmp_path_factory.mktemp("costs"))
    return load_settings(None, {"model.dtype": "float32", "speculation.cost_folder": costs, "model.threads": "1"})


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Returns what was printed in 80 columns; fails if a cell was truncated or a line is longer."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def read() -> str:
        text = capsys.readouterr().out
        assert text
        assert "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH, text
        return text

    return read
