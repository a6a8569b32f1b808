"""Sessions are bounded in number, used by one request at a time, and never shared."""

import numpy as np
import pytest

from outrider.drafters.none import NoDrafter
from outrider.server.worker.session import Session, SessionKey
from outrider.server.worker.sessions import SessionStore
from outrider.verify import system_memory
from outrider.verify.decode import decode, step
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.tensor_cache import TensorCache
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier

PROMPT = np.arange(5, dtype=np.int32)


def test_sessions_that_share_a_slot_keep_their_prefix(tiny_runner: TorchRunner) -> None:
    """Three sessions in one slot: each continues from its prefix, with the tokens of a session that is never swapped out."""
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens=5)
    store = SessionStore(tiny_runner, capacity=3, ttl_seconds=60, slots=1)
    texts = {name: np.arange(start, start + 12, dtype=np.int32) for name, start in (("a", 3), ("b", 30), ("c", 60))}
    unswapped = {name: Verifier(tiny_runner, tiny_runner.new_cache()) for name in texts}
    for turn in range(3):
        for name, text in texts.items():
            session = store.acquire("p", name, PROMPT)
            assert session is not None
            assert store.acquire("p", None, PROMPT) is None  # the only slot is busy
            answer = decode(session.verifier, NoDrafter(), text, options).tokens
            assert answer == decode(unswapped[name], NoDrafter(), text, options).tokens
            store.release(session)
            texts[name] = np.concatenate([text, np.array(answer, np.int32)])
        assert [name for (_, name), other in store._sessions.items() if other.verifier.is_swapped_out] == ["a", "b"], turn
    session = store.acquire("p", "a", PROMPT)
    assert session is not None
    stream = Stream(session.verifier, NoDrafter(), texts["a"], options)
    assert stream.reused_tokens == len(texts["a"]) - 1
    store.release(session)
    for other_name in ("d", "e", None):
        other = store.acquire("p", other_name, PROMPT)
        assert other is not None
        assert not len(other.verifier.sequence)
        store.release(other)


def test_one_principals_sessions_do_not_evict_anothers(tiny_runner: TorchRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60)
    quiet = store.acquire("quiet", "s", PROMPT)
    assert quiet is not None
    store.release(quiet)
    for number in range(5):
        session = store.acquire("busy", str(number), PROMPT)
        assert session is not None
        store.release(session)
    assert len(store) == 2
    assert store.acquire("quiet", "s", PROMPT) is quiet


def test_the_rows_of_a_freed_slot_return_to_the_system(tiny_runner: TorchRunner) -> None:
    store = SessionStore(tiny_runner, capacity=2, ttl_seconds=60, slots=1)
    session = store.acquire("p", "a", PROMPT)
    assert session is not None
    slot = session.verifier.cache
    assert isinstance(slot, TensorCache)
    for keys, values in slot.layers:
        keys.fill(1)
        values.fill(1)
    store.release(session)
    assert all((plane == 1).all() for layer in slot.layers for plane in layer)  # a kept session
    store.forget(SessionKey("p", "a"))
    assert all((plane == 0).mean() > 0.4 for layer in slot.layers for plane in layer)  # whole pages of the system


def token_bytes(runner: TorchRunner) -> int:
    return runner.cache_shape.bytes_for(1)


def test_paused_streams_of_one_principal_take_no_more_than_its_share(tiny_runner: TorchRunner) -> None:
    """Rows beyond it are dropped and read again; the answers and the other principal's session stay as they are."""
    options, quiet_text = DecodeOptions(SamplingParams(temperature=0), max_tokens=8), np.arange(20, dtype=np.int32)
    texts = [np.arange(start, start + 30, dtype=np.int32) for start in (2, 20, 40, 60)]
    expected = [decode(Verifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), text, options).tokens for text in texts]
    for name in ("a", None):
        bound = 100 * token_bytes(tiny_runner)
        store = SessionStore(tiny_runner, capacity=4, ttl_seconds=60, slots=2, kv_bytes=bound)
        quiet = store.acquire("quiet", "s", quiet_text)
        assert quiet is not None
        decode(quiet.verifier, NoDrafter(), quiet_text, options)
        store.release(quiet)
        paused: list[tuple[Session, Stream, list[int]]] = []
        for number, text in enumerate(texts):
            session = store.acquire("unread", name and f"{name}{number}", text)
            assert session is not None
            stream = Stream(session.verifier, NoDrafter(), text, options)
            tokens: list[int] = []
            while len(tokens) < 4:
                tokens += step(stream).tokens
            store.pause(session)
            paused.append((session, stream, tokens))
        rows = [session.verifier.committed_rows for session, _, _ in paused]
        assert rows[0] == 0 and rows[-1] and sum(rows) * token_bytes(tiny_runner) <= bound
        assert quiet.verifier.committed_rows > 20
        for (session, stream, tokens), right in zip(paused, expected, strict=True):
            assert store.resume(session)
            while len(tokens) < len(right):
                tokens += step(stream).tokens
            assert tokens == right
            store.release(session)
        assert store.acquire("quiet", "s", quiet_text) is quiet


def test_all_rows_fit_the_memory_of_a_container(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a small control group: slots, swapped-out pages and paused requests of several principals share one budget."""
    monkeypatch.setattr(kv_cache, "PAGE_TOKENS", 8)
    limit = 400 * token_bytes(tiny_runner)
    monkeypatch.setattr(system_memory, "container_limits", lambda: [(limit + 1000, 1000)])
    budget = int(0.8 * limit)
    store = SessionStore(tiny_runner, capacity=50, ttl_seconds=60, slots=3, automatic=True, kv_bytes=1 << 40)
    options = DecodeOptions(SamplingParams(temperature=0), max_tokens=4)
    paused: list[Session] = []
    most = 0
    for number in range(40):
        shared = np.arange(24, dtype=np.int32) + number % 4
        prompt = np.concatenate([shared, np.full(number % 30, 5 + number % 60, np.int32)])
        session = store.acquire(f"principal {number % 4}", str(number) if number % 3 else None, prompt)
        assert session is not None
        decode(session.verifier, NoDrafter(), prompt, options)
        if number % 5 == 0:
            store.pause(session)
            paused.append(session)
        else:
            store.release(session)
        held = store._eviction.resident_bytes(store._all)
        assert held <= budget
        most = max(most, held)
    assert most > budget / 2  # it was filled
    for session in paused:
        assert store.resume(session)
        store.release(session)
