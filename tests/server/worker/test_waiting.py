"""Requests that wait, are paused or cancelled, and the sessions that they leave: kept, forgotten and saved."""

import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from outrider.drafters.interface import Ints
from outrider.server.engine.messages import Cancel, Failed, Forget, Pause, Resume, TokenEvent
from outrider.server.worker.session import Session
from outrider.server.worker.storage import session_files
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig, request

NAMES_ONLY = {"sessions.automatic": "off"}


def test_requests_of_one_session_wait_for_each_other(tiny_runner: TorchRunner) -> None:
    """Where only names find sessions."""
    rig = Rig(tiny_runner, NAMES_ONLY)
    rig.send(*(request(id, session="s") for id in "ab"), request("c", session="s", principal="other"))
    rig.step()
    assert rig.order.index("c") < rig.order.index("b")  # sessions belong to their principal
    assert max(i for i, id in enumerate(rig.order) if id == "a") < rig.order.index("b")
    events = [message for message in rig.sent if isinstance(message, TokenEvent)]
    assert next(event for event in events if event.id == "b").cached_tokens == 2
    assert next(event for event in events if event.id == "c").cached_tokens == 0
    rig.close()


def test_a_name_makes_nobody_wait_where_sessions_are_found_by_text(rig: Rig) -> None:
    rig.send(request("title", session="s", prompt=[5] * 40), request("chat", session="s", prompt=[6] * 40))
    rig.step(3)
    assert rig.tokens("title") and rig.tokens("chat")
    rig.step()
    rig.send(request("next", session="s", prompt=[6] * 40 + rig.tokens("chat") + [1]))
    rig.step()
    assert [event.cached_tokens for event in rig.sent if isinstance(event, TokenEvent) and event.reuse] == [0, 0, 43]


def test_a_cancelled_request_is_removed(rig: Rig) -> None:
    rig.send(request("a"), request("b"), request("c"), Pause("c"), Cancel("a"), Cancel("c"), Cancel("unknown"))
    rig.step()
    assert set(rig.order) == {"b"}
    rig.send(request("d"))
    rig.step(2)
    rig.send(Pause("d"))
    rig.send(Cancel("d"), Resume("d"))
    rig.step()
    assert not rig.worker.scheduler.active and rig.worker.sessions._slots.free == 2


def test_paused_requests_hold_nothing_that_others_need(rig: Rig) -> None:
    """Three requests are paused, one before it has started; two slots then serve others; all of them end as without a pause."""
    rig.send(request("alone"))
    rig.step()
    rig.send(request("a", session="s"), request("b"), request("c"))
    rig.step(3)
    rig.send(Pause("a"), Pause("b"), Pause("c"), request("d", prompt=[5, 6]), request("e", prompt=[7, 8]))
    rig.step()
    assert (len(rig.tokens("d")), len(rig.tokens("e")), len(rig.tokens("c"))) == (4, 4, 0)
    assert len(rig.tokens("a")) < 4
    rig.send(Resume("c"), Resume("a"), Resume("b"), Resume("unknown"))
    rig.step()
    assert rig.tokens("a") == rig.tokens("b") == rig.tokens("c") == rig.tokens("alone")


@pytest.mark.parametrize("ends_by", ["its last token", "a cancellation"])
def test_a_request_that_waits_to_continue_is_paused_again(rig: Rig, ends_by: str) -> None:
    """However often it is paused, it continues once, and leaves nothing behind."""
    rig.send(request("alone", max_tokens=9))
    rig.step()
    rig.send(request("a", session="s", max_tokens=9))
    rig.step(3)
    rig.send(Pause("a"), request("b", max_tokens=20), request("c", max_tokens=20))
    rig.step(1)
    for _ in range(2):
        rig.send(Resume("a"))
        rig.step(1)  # both slots are in use, so the request waits
        rig.send(Pause("a"))
    rig.send(Resume("a"), Cancel("b"))
    rig.step(2)
    assert [job.id for job in rig.worker.scheduler.active] == ["c", "a"] and len(rig.tokens("a")) < 9
    rig.send(*([Cancel("a")] if ends_by == "a cancellation" else []), request("d", prompt=[5, 6]))
    rig.step()
    assert rig.tokens("a") == rig.tokens("alone")[: len(rig.tokens("a"))]
    assert (len(rig.tokens("a")) == 9) == (ends_by == "its last token")
    assert (len(rig.tokens("c")), len(rig.tokens("d"))) == (20, 4)
    rig.send(Forget("", "s"))
    rig.worker.sessions.trim()


def test_a_request_that_cannot_continue_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(request("a", session="s", max_tokens=9))
    rig.step(3)
    rig.send(Pause("a"), request("b"), request("c"))
    rig.step()

    def broken(session: Session) -> bool:
        raise ValueError("its rows cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(rig.worker.sessions, "resume", broken)
        rig.send(Resume("a"))
        rig.step(1)
    assert [message.id for message in rig.sent if isinstance(message, Failed)] == ["a"]
    rig.send(request("d", session="s"), request("e", prompt=[5, 6]))
    rig.step()
    assert (len(rig.tokens("d")), len(rig.tokens("e"))) == (4, 4)


def test_a_session_is_forgotten(rig: Rig) -> None:
    rig.send(request("a", session="s", principal="p"))
    rig.step()
    rig.send(Forget("other", "s"))
    assert len(rig.worker.sessions) == 1
    rig.send(Forget("p", "s"))
    assert len(rig.worker.sessions) == 0


def test_a_waiting_request_is_tried_again_after_a_change_only(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try hashes the whole prompt, in the time of everybody's round."""
    rig = Rig(tiny_runner, NAMES_ONLY)
    tries: list[str | None] = []
    acquire = rig.worker.sessions.acquire

    def counted(principal: str, name: str | None, prompt: Ints, temporary: bool) -> Session | None:
        tries.append(name)
        return acquire(principal, name, prompt, temporary)

    monkeypatch.setattr(rig.worker.sessions, "acquire", counted)
    rig.send(request("first", max_tokens=20, session="s"), request("second", session="s"))
    rig.step(15)
    assert tries == ["s", "s"]
    rig.step()
    assert tries == ["s", "s", "s"] and len(rig.tokens("second")) == 4
    rig.close()


def test_a_request_that_arrives_stops_the_saving_of_a_session(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pages, while the disk is busy with the first. So nobody waits for the rest, and it is saved afterwards."""
    reached, released = threading.Event(), threading.Event()

    def slow(file: BinaryIO) -> None:
        reached.set()
        assert released.wait(60)

    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", 16)
    monkeypatch.setattr(session_files, "flush", slow)
    rig = Rig(tiny_runner, {"sessions.folder": str(tmp_path), **NAMES_ONLY})
    rig.send(request("a", session="s", prompt=list(range(64))))
    rig.step()
    rig.worker.sessions.save()
    assert reached.wait(60)
    rig.send(request("b", session="s"))
    rig.step()
    assert len(rig.tokens("b")) == 4
    released.set()
    saver = rig.worker.sessions._saver
    assert saver is not None
    saver.wait(60)
    assert len(list(tmp_path.glob("*/*/*.page"))) == 1 and not list(tmp_path.glob("*/*/*.session"))
    rig.worker.sessions.save_all(60)
    assert len(list(tmp_path.glob("*/*/*.session"))) == 1
    rig.close()


def test_a_folder_of_another_user_costs_a_log_line(
    tiny_runner: TorchRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    rig = Rig(tiny_runner, {"sessions.folder": str(tmp_path)})
    rig.send(request("a", session="s"))
    rig.step()
    rig.worker.sessions.save_all(60)
    assert len(rig.tokens("a")) == 4 and not list(tmp_path.iterdir())
    assert [record.message for record in caplog.records if "belongs to another user" in record.message]
    rig.close()
