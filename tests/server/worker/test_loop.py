"""The loop serves requests together; a failed step ends one request; a lost device ends the worker."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.server.engine.messages import Accepted, Cancel, Failed, Pause, Resume, Status, TokenEvent
from outrider.server.worker.loop import Worker
from outrider.server.worker.storage import session_files
from outrider.verify import controller
from outrider.verify.constraints.grammar import GrammarError
from outrider.verify.model.cache import paging
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig, request


@pytest.fixture
def rig(tiny_runner: TorchRunner) -> Iterator[Rig]:
    made = Rig(tiny_runner)
    yield made
    made.close()


def raising(error: Exception) -> Any:
    """A function that raises."""

    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


def test_active_requests_share_rounds(rig: Rig) -> None:
    rig.send(request("a"), request("b"), request("c"))
    rig.step()
    assert {id: len(rig.tokens(id)) for id in "abc"} == {"a": 4, "b": 4, "c": 4}
    assert rig.order[:4] == ["a", "b", "a", "b"] and rig.order.index("c") > 4
    assert any(isinstance(message, Status) for message in rig.sent)


@pytest.fixture
def long_rig(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A worker that answers two requests at a time, with eight KV caches of 4,000 tokens, and chunks of 64 tokens."""
    config = copy.deepcopy(tiny_config)
    config.max_position_embeddings = 4000
    monkeypatch.setattr(controller, "READING_SECONDS", 0.0)
    monkeypatch.setattr(controller, "READING_TOKENS", 64)
    made = Rig(TorchRunner(LlamaForCausalLM(config)), slots=8)
    yield made
    made.close()


def prompt(tokens: int, first: int = 1) -> list[int]:
    return [first, *(number % 90 for number in range(tokens - 1))]


def test_a_short_prompt_does_not_wait_for_long_ones(long_rig: Rig) -> None:
    """An editor's two new tokens beside agents' prompts of 3,000 tokens: the first token comes in the second round."""
    rig = long_rig
    rig.send(request("cache", prompt=prompt(600, 7), max_tokens=1))
    rig.step()
    rig.send(*(request(f"agent {number}", prompt=prompt(3000, number)) for number in range(4)))
    rig.step(3)
    rig.send(request("editor", prompt=[*prompt(600, 7), 5, 6], max_tokens=2))
    rig.step(2)
    assert len(rig.tokens("editor")) == 1
    assert next(event for event in rig.sent if isinstance(event, TokenEvent) and event.id == "editor").cached_tokens >= 599
    rig.step(500)
    assert [len(rig.tokens(f"agent {number}")) for number in range(4)] == [4] * 4


def test_short_prompts_without_end_do_not_stop_a_long_one(long_rig: Rig) -> None:
    rig, rounds = long_rig, 0
    rig.send(request("long", prompt=prompt(3000)))
    while not rig.tokens("long"):
        rig.send(request(f"short {rounds}", prompt=[*prompt(500, 2), rounds % 90], max_tokens=1))
        rig.step(1)
        rounds += 1
        assert rounds < 2 + 4 * 3000 / 60
    assert len(rig.tokens("short 5")) == 1


def test_a_failed_step_ends_only_its_request(rig: Rig) -> None:
    rig.send(request("a", session="s"), request("b"))
    rig.step(1)
    job = rig.worker._active[1]
    assert job.id == "b"
    job.session.verifier.judge = raising(RuntimeError("shapes"))  # type: ignore[method-assign]
    rig.step()
    assert [message.id for message in rig.sent if isinstance(message, Failed)] == ["b"]
    assert not job.session.drafters and not len(job.session.verifier.sequence)  # their state is unknown
    assert len(rig.tokens("a")) == 4
    rig.send(request("c"))
    rig.step()
    assert len(rig.tokens("c")) == 4


def test_a_lost_device_ends_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(request("a"))
    rig.step(1)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(rig.worker._runtime.runner, "forward_all", raising(error))
    with pytest.raises(torch.AcceleratorError):
        rig.step(1)


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
    assert not rig.worker._active and rig.worker._sessions._slots.free == 2


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


def test_rounds_of_half_the_requests_alternate(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that computes while the host works: the answers are the same, and no request is lost or doubled."""
    rig = Rig(tiny_runner, {"scheduling.max_active": 4})
    rig.worker._runtime.max_active = 4
    rig.send(*(request(id, prompt=[1, 2, number], max_tokens=9) for number, id in enumerate("abcd")))
    rig.step()
    expected = {id: rig.tokens(id) for id in "abcd"}
    monkeypatch.setattr(Worker, "_alternates", property(lambda worker: len(worker._active) > 1))
    rig.sent.clear()
    rig.send(*(request(id, prompt=[1, 2, number], max_tokens=9) for number, id in enumerate("abcd")))
    rig.step(5)
    assert rig.worker._launched is not None
    rig.send(Pause("c"), Cancel("b"))
    assert rig.worker._launched is None
    rig.step(3)
    rig.send(Resume("c"))
    rig.step()
    assert {id: rig.tokens(id) for id in "acd"} == {id: expected[id] for id in "acd"}
    assert rig.tokens("b") == expected["b"][: len(rig.tokens("b"))] and len(rig.tokens("b")) < 9
    assert not rig.worker._active and rig.worker._launched is None
    rig.close()


def test_a_request_is_accepted_before_it_begins_unless_its_client_can_mend_it(rig: Rig) -> None:
    """So a stream has its head while the request waits, and a refusal its status."""

    class Grammars:
        def compile(self, grammar: str, principal: str) -> None:
            raise GrammarError("unknown token")

    rig.worker._runtime.grammars = Grammars()  # type: ignore[assignment]
    rig.send(request("a"), request("b"), request("c"), request("d", grammar="x"), request("e", prompt=[1] * 128))
    rig.step(0)
    assert [message.id for message in rig.sent if isinstance(message, Accepted)] == ["a", "b", "c"]
    failed = [message for message in rig.sent if isinstance(message, Failed)]
    assert [message.id for message in failed] == ["d", "e"] and all(message.client_error for message in failed)
    rig.step()
    assert len(rig.tokens("c")) == 4


def test_a_request_that_arrives_stops_the_saving_of_a_session(
    tiny_runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two pages, while the disk is busy with the first. So nobody waits for the rest, and it is saved afterwards."""
    reached, released = threading.Event(), threading.Event()

    def slow(file: BinaryIO) -> None:
        reached.set()
        assert released.wait(60)

    monkeypatch.setattr(paging, "PAGE_TOKENS", 16)
    monkeypatch.setattr(session_files, "flush", slow)
    rig = Rig(tiny_runner, {"sessions.folder": str(tmp_path), **NAMES_ONLY})
    rig.send(request("a", session="s", prompt=list(range(64))))
    rig.step()
    rig.worker._sessions.save()
    assert reached.wait(60)
    rig.send(request("b", session="s"))
    rig.step()
    assert len(rig.tokens("b")) == 4
    released.set()
    saver = rig.worker._sessions._saver
    assert saver is not None
    saver.wait(60)
    assert len(list(tmp_path.glob("*/*/*.page"))) == 1 and not list(tmp_path.glob("*/*/*.session"))
    rig.worker._sessions.save_all(60)
    assert len(list(tmp_path.glob("*/*/*.session"))) == 1
    rig.close()
