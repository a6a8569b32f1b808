"""Sessions are bounded in number, used by one request at a time, and never shared."""

import numpy as np

from drafters.none import NoDrafter
from drafters.registry import Resources
from server.worker.sessions import Session, SessionStore
from verify.decode import DecodeOptions, Generation, decode
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_named_session_is_reused_and_an_unnamed_one_is_not(tiny_runner: ModelRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60)
    first = store.acquire("a")
    assert first is not None
    store.release(first)
    assert store.acquire("a") is first
    unnamed = store.acquire(None)
    assert unnamed is not None
    store.release(unnamed)
    assert len(store) == 1
    assert store.acquire(None) is not unnamed


def test_a_busy_session_cannot_be_acquired(tiny_runner: ModelRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60)
    held = store.acquire("a")
    assert held is not None
    assert store.acquire("a") is None
    store.release(held)
    assert store.acquire("a") is held


def test_the_least_recently_used_session_is_evicted_first(tiny_runner: ModelRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60)
    made: dict[str, Session] = {}
    for key in ("a", "b", "a", "c"):
        session = store.acquire(key)
        assert session is not None
        made.setdefault(key, session)
        store.release(session)
    assert len(store) == 2
    assert store.acquire("a") is made["a"]
    assert store.acquire("b") is not made["b"]


def test_idle_sessions_expire(tiny_runner: ModelRunner) -> None:
    clock = Clock()
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60, clock=clock)
    session = store.acquire("a")
    assert session is not None
    store.release(session)
    clock.now = 59
    store.expire()
    assert len(store) == 1
    clock.now = 61
    store.expire()
    assert len(store) == 0


def test_sessions_do_not_share_drafters_or_caches(tiny_runner: ModelRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60)
    a, b = store.acquire("a"), store.acquire("b")
    assert a is not None and b is not None
    resources = Resources()
    assert a.drafter("trigram", resources) is a.drafter("trigram", resources)
    assert a.drafter("trigram", resources) is not b.drafter("trigram", resources)
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens=5)
    decode(a.verifier, NoDrafter(), np.arange(20, dtype=np.int32), options)
    assert not len(b.verifier.sequence)
    assert 0 < store.usage_ratio < 1


def test_sessions_that_share_a_slot_keep_their_prefix(tiny_runner: ModelRunner) -> None:
    """Three sessions in one slot: each continues from its prefix, with the tokens of a session that is never swapped out."""
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens=5)
    store = SessionStore(tiny_runner, capacity=3, ttl_seconds=60, slots=1)
    texts = {key: np.arange(start, start + 12, dtype=np.int32) for key, start in (("a", 3), ("b", 30), ("c", 60))}
    unswapped = {key: TreeVerifier(tiny_runner, tiny_runner.new_cache()) for key in texts}
    for turn in range(3):
        for key, text in texts.items():
            session = store.acquire(key)
            assert session is not None
            assert store.acquire(None) is None  # the only slot is busy
            answer = decode(session.verifier, NoDrafter(), text, options).tokens
            assert answer == decode(unswapped[key], NoDrafter(), text, options).tokens
            store.release(session)
            texts[key] = np.concatenate([text, np.array(answer, np.int32)])
        assert [key for key, other in store._sessions.items() if other.verifier.is_swapped_out] == ["a", "b"], turn
    session = store.acquire("a")
    assert session is not None
    generation = Generation(session.verifier, NoDrafter(), texts["a"], options)
    assert generation.reused_tokens == len(texts["a"]) - 1
    store.release(session)
    for name in ("d", "e", None):
        other = store.acquire(name)
        assert other is not None
        assert not len(other.verifier.sequence)
        store.release(other)
