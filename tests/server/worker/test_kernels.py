"""Kernels are loaded from numba's cache; a background process compiles missing ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from typing import Any

import numba
import pytest
from numba import njit

from outrider.drafters.registry import Resources
from outrider.server.settings import load_settings
from outrider.server.worker import kernels
from outrider.server.worker.kernels import Kernels
from outrider.server.worker.resources import Tables

TABLES = Tables(lambda: "no tokenizer", 100)


class FakeProcess:
    """Stands in for the compiling process."""

    def __init__(self, exit_code: int | None) -> None:
        self.returncode = exit_code
        self.killed = False

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.killed = True

    def communicate(self) -> None:
        """Returns at once."""


def uncached() -> Callable[..., None]:
    """A replacement for `warm` whose kernel has never been compiled."""
    compiled = njit(lambda value: value + 1)
    return lambda *_: compiled(1)


def with_process(monkeypatch: pytest.MonkeyPatch, exit_code: int | None) -> tuple[Kernels, FakeProcess]:
    """Kernels whose compiling process has been started."""
    process: Any = FakeProcess(exit_code)
    process.stdin = type("Pipe", (), {"write": lambda self, text: None, "flush": lambda self: None})()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: process)
    monkeypatch.setattr(kernels, "warm", uncached())
    made = Kernels(load_settings())
    made.load([Resources()], TABLES)
    made.poll()
    assert not made.ready
    return made, process


def test_without_background_kernels_are_compiled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "warm", uncached())
    made = Kernels(load_settings(), background=False)
    made.load([Resources()], TABLES)
    assert made.ready


def test_cached_kernels_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "warm", lambda *_: None)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    made = Kernels(load_settings())
    made.load([Resources()], TABLES)
    assert not made.ready
    made.poll()
    assert made.ready
    made.close()


def test_kernels_are_loaded_once_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made, process = with_process(monkeypatch, None)
    made.poll()
    assert not made.ready
    process.returncode = 0
    monkeypatch.setattr(kernels, "warm", lambda *_: None)  # now in the cache
    with caplog.at_level("INFO"):
        made.poll()
    assert made.ready
    assert "kernels are compiled after" in caplog.text
    made.close()
    assert not process.killed


def test_the_default_drafter_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels are compiled by the first process; a second one compiles the others'."""
    made, process = with_process(monkeypatch, None)
    assert made.covers("none") and not made.covers("fusion")
    refuse = uncached()
    monkeypatch.setattr(kernels, "warm", lambda each, names: None if "fusion" in names else refuse())
    process.returncode = 0
    made.poll()
    assert made.covers("fusion") and not made.covers("lookup") and not made.ready
    monkeypatch.setattr(kernels, "warm", lambda *_: None)
    made.poll()
    assert made.covers("lookup") and made.ready


@pytest.mark.parametrize("exit_code", [0, 1])
def test_without_cached_kernels_drafts_stay_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, exit_code: int
) -> None:
    made, _ = with_process(monkeypatch, exit_code)
    made.poll()
    assert not made.ready
    assert "could not be cached" in caplog.text


def test_closing_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    made, process = with_process(monkeypatch, None)
    made.close()
    assert process.killed


@pytest.mark.slow
def test_the_process_compiles_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The real process with an empty cache: it starts to compile, and `close` ends it."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)  # numba resets it with the environment
    monkeypatch.setattr(kernels, "warm", uncached())
    made = Kernels(load_settings(None, {"model.path": "elsewhere"}))
    made.load([Resources()], TABLES)
    made.poll()
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.rglob("*.nbi")) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert list(tmp_path.rglob("*.nbi"))
        assert not made.ready
    finally:
        made.close()
