"""The supervisor forwards messages, restarts the worker on crash or stall, and gives up on one that never became ready.

Restarts that fail are repeated for as long as the server runs.
"""

import asyncio
import errno
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from outrider.server.engine import supervisor
from outrider.server.engine.messages import FromWorker
from outrider.server.engine.supervisor import Supervisor
from outrider.server.settings import Settings, load_settings
from tests.server.engine.rig import READY, Launcher


class Watched:
    def __init__(self, settings: Settings | None = None) -> None:
        self.messages: list[FromWorker] = []
        self.lost = 0
        self.unavailable: list[str] = []
        self.failures: list[str] = []
        self.launcher = Launcher()
        self.supervisor = Supervisor(
            settings or load_settings(),
            self.messages.append,
            self._on_lost,
            self.unavailable.append,
            self.failures.append,
            self.launcher,
        )

    async def start(self) -> None:
        await self.supervisor.start()
        self.launcher.started[-1].send(READY)
        await until(lambda: self.messages)

    def _on_lost(self) -> None:
        self.lost += 1


@asynccontextmanager
async def running(settings: Settings | None = None) -> AsyncIterator[Watched]:
    watched = Watched(settings)
    yield watched
    await watched.supervisor.stop()


async def until(condition: Callable[[], object]) -> None:
    """Runs the event loop until `condition` holds."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_crashed_worker_is_restarted_at_once_and_its_successor_after_a_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MIN_DELAY_SECONDS", 0.05)
    async with running() as watched:
        await watched.supervisor.start()
        for number in range(1, 3):
            watched.launcher.started[-1].send(READY)
            await until(lambda number=number: len(watched.messages) == number)  # type: ignore[misc]
            watched.launcher.started[-1].die(-9)
            await until(lambda number=number: len(watched.launcher.started) == number + 1)  # type: ignore[misc]
            assert watched.lost == number
        assert watched.supervisor._next_delay() == pytest.approx(0.1)
        assert not watched.failures


async def test_a_silent_busy_worker_and_a_stopped_idle_one_are_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "WATCH_SECONDS", 0.01)
    async with running(load_settings(None, {"scheduling.stall_seconds": 0.1})) as watched:
        await watched.supervisor.start()
        busy = False
        watched.supervisor.watch(lambda: busy)
        worker = watched.launcher.started[0]
        worker.send(READY)
        await asyncio.sleep(0.15)
        assert worker.alive  # an idle worker may be silent
        busy = True
        await until(lambda: len(watched.launcher.started) == 2)
        busy = False
        assert not worker.alive
        watched.launcher.started[1].send(READY)
        await asyncio.sleep(0.15)
        assert watched.launcher.started[1].alive
        monkeypatch.setattr(supervisor, "is_stopped", lambda _: True)  # no request comes that would find it out
        await until(lambda: len(watched.launcher.started) == 3)
        assert not watched.launcher.started[1].alive
    assert "made no progress for 0.1 s" in caplog.text


TOO_MANY_FILES = OSError(errno.EMFILE, "Too many open files")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts and checks follow each other in milliseconds."""
    for name in ("MIN_DELAY_SECONDS", "MAX_DELAY_SECONDS", "WATCH_SECONDS"):
        monkeypatch.setattr(supervisor, name, 0.001)


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_can_never_be_spawned_is_reported_while_the_attempts_go_on() -> None:
    async with running() as watched:
        await watched.start()
        watched.launcher.errors = itertools.repeat(TOO_MANY_FILES)
        watched.launcher.started[0].die(-9)
        await until(lambda: len(watched.unavailable) >= 3)
        assert "Too many open files" in watched.unavailable[0]
        assert (watched.lost, watched.failures) == (1, [])
        watched.launcher.errors = iter(())
        await until(lambda: len(watched.launcher.started) == 2)
        watched.launcher.started[1].send(READY)
        await until(lambda: len(watched.messages) == 2)
        assert watched.supervisor._failed_starts == 0


@pytest.mark.usefixtures("impatient")
async def test_a_worker_that_hangs_while_it_loads_is_replaced_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 0.05)
    async with running() as watched:
        await watched.start()
        watched.supervisor.watch(lambda: False)
        watched.launcher.started[0].die(-9)
        await until(lambda: len(watched.launcher.started) >= 3)  # the second one never becomes ready
        assert not watched.launcher.started[1].alive
        assert "not ready within 0.05 s; if its model takes longer to download" in watched.unavailable[0]
        assert not watched.failures
