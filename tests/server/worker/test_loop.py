"""The loop serves requests together; a failed step ends one request; a lost device ends the worker."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.none import NoDrafter
from outrider.server.engine.messages import Accepted, Cancel, Failed, Pause, Resume, Shutdown, Status, TokenEvent
from outrider.server.worker.loop import Worker
from outrider.verify import controller
from outrider.verify.constraints.grammar import GrammarError
from outrider.verify.cost import CostCurve, parse
from outrider.verify.measurement import NODES
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig, request


def raising(error: Exception) -> Any:
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
    """A worker that answers two requests at a time, with eight KV caches of 9,000 tokens, and chunks of 64 tokens."""
    config = copy.deepcopy(tiny_config)
    config.max_position_embeddings = 9000
    monkeypatch.setattr(controller, "READING_SECONDS", 0.0)
    monkeypatch.setattr(controller, "READING_TOKENS", 64)
    made = Rig(TorchRunner(LlamaForCausalLM(config)), slots=8)
    yield made
    made.close()


def prompt(tokens: int, first: int = 1) -> list[int]:
    return [first, *(number % 90 for number in range(tokens - 1))]


def test_a_short_prompt_does_not_wait_for_long_ones(long_rig: Rig) -> None:
    """An editor's two new tokens beside agents' prompts of 4,000 tokens: the first token comes in the second round."""
    rig = long_rig
    rig.send(request("cache", prompt=prompt(600, 7), max_tokens=1))
    rig.step()
    rig.send(*(request(f"agent {number}", prompt=prompt(4000, number)) for number in range(4)))
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


def test_a_short_prompt_that_begins_like_a_long_one_waits_for_that_beginning_only(long_rig: Rig) -> None:
    rig = long_rig
    rig.send(request("oldest", prompt=prompt(8000, 5)))
    rig.step(2)
    rig.send(request("long", prompt=prompt(4000, 3)), request("like it", prompt=[*prompt(44, 3), 1], max_tokens=1))
    rig.send(request("other", prompt=prompt(3000, 4)))
    rig.step(3)
    assert len(rig.tokens("like it")) == 1 and not rig.tokens("other")


def test_the_end_of_a_request_costs_nobody_a_turn(rig: Rig) -> None:
    rig.send(request("a", max_tokens=2), request("b", max_tokens=6), request("c", max_tokens=6))
    rig.step()
    assert "".join(rig.order) == "ababbbcbcbccccc"[:14]  # the first round of c reads its prompt


def test_a_failed_step_ends_only_its_request(rig: Rig) -> None:
    rig.send(request("a", session="s"), request("b"))
    rig.step(1)
    job = rig.worker.scheduler.active[1]
    assert job.id == "b"
    job.session.verifier.judge = raising(RuntimeError("shapes"))  # type: ignore[method-assign]
    rig.step()
    assert [message.id for message in rig.sent if isinstance(message, Failed)] == ["b"]
    assert not job.session.drafters and not len(job.session.verifier.sequence)  # their state is unknown
    assert len(rig.tokens("a")) == 4
    rig.send(request("c"))
    rig.step()
    assert len(rig.tokens("c")) == 4


def test_a_session_that_cannot_be_acquired_fails_only_its_request(rig: Rig) -> None:
    rig.send(request("a"))
    rig.step(1)
    acquire = rig.worker.sessions.acquire
    rig.worker.sessions.acquire = raising(RuntimeError("rows of another shape"))  # type: ignore[method-assign]
    rig.send(request("b"))
    rig.step(1)
    rig.worker.sessions.acquire = acquire  # type: ignore[method-assign]
    rig.send(request("c"))
    rig.step()
    assert [message.id for message in rig.sent if isinstance(message, Failed)] == ["b"]
    assert (len(rig.tokens("a")), len(rig.tokens("c"))) == (4, 4)


def test_a_drafter_that_fails_at_the_end_fails_nobody(rig: Rig) -> None:
    rig.send(request("a", session="s"), request("b"))
    rig.step(1)
    rig.worker.scheduler.active[-1].stream._drafter.end = raising(RuntimeError("draft model"))  # type: ignore[method-assign]
    rig.step()
    assert (len(rig.tokens("a")), len(rig.tokens("b"))) == (4, 4)
    rig.send(request("c", session="s"))
    rig.step()
    assert rig.tokens("c") == rig.tokens("a")


def test_a_lost_device_ends_the_worker(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(request("a"))
    rig.step(1)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(rig.worker._runtime.runner, "forward_all", raising(error))
    with pytest.raises(torch.AcceleratorError):
        rig.step(1)


def test_a_request_that_cannot_start_leaves_nothing_half_begun(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.send(request("a", session="s"))
    rig.step()
    session = rig.worker.sessions.acquire("", "s", np.arange(3, dtype=np.int32))
    assert session is not None and session.drafters
    rig.worker.sessions.release(session)
    monkeypatch.setattr(NoDrafter, "begin", raising(RuntimeError("memory")))
    rig.send(request("b", session="s"))
    rig.step()
    assert [message.id for message in rig.sent if isinstance(message, Failed)] == ["b"]
    assert not session.drafters and not len(session.verifier.sequence)


def test_as_many_requests_as_pay_by_what_steps_take(tiny_runner: TorchRunner, tmp_path: Path) -> None:
    """A noisy first measurement allows two; their steps correct the curve, which is saved for the next start."""
    rig = Rig(tiny_runner, {"scheduling.max_active": None})
    runtime = rig.worker._runtime
    runtime.curve = CostCurve(NODES, (64,), [[1.0] * len(NODES)], stream_seconds=1.0)
    runtime.curve_file, runtime.slots, rig.worker.scheduler.max_active = tmp_path / "curve.json", 4, 2
    assert runtime.curve.streams_worth_running(4) == 2
    rig.send(*(request(id, max_tokens=40) for id in "ab"))
    rig.step()
    assert rig.worker.scheduler.max_active == 4
    assert [message.max_active for message in rig.sent if isinstance(message, Status)][-1] == 4
    runtime.save_findings()
    assert parse(runtime.curve_file.read_text()).stream_seconds == runtime.curve.stream_seconds < 0.5
    runtime.curve_file.unlink()
    runtime.save_findings()
    assert not runtime.curve_file.exists()  # nothing new
    rig.close()


def test_rounds_of_half_the_requests_alternate(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device that computes while the host works: the answers are the same, and no request is lost or doubled."""
    rig = Rig(tiny_runner, {"scheduling.max_active": 4})
    rig.worker.scheduler.max_active = 4
    rig.send(*(request(id, prompt=[1, 2, number], max_tokens=9) for number, id in enumerate("abcd")))
    rig.step()
    expected = {id: rig.tokens(id) for id in "abcd"}
    monkeypatch.setattr(Worker, "_overlaps", property(lambda worker: len(worker.scheduler.active) > 1))
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
    assert not rig.worker.scheduler.active and rig.worker._launched is None
    rig.close()


def test_an_invalid_request_fails_alone(rig: Rig) -> None:
    rig.send(request("a", prompt=[]), request("b"))
    rig.step()
    [failed] = [message for message in rig.sent if isinstance(message, Failed)]
    assert (failed.id, failed.client_error) == ("a", True)
    assert set(rig.order) == {"b"}


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


def test_a_shutdown_ends_the_loop(rig: Rig) -> None:
    assert rig.send(request("a"))
    assert not rig.send(Shutdown())
