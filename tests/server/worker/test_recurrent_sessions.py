"""Sessions of models with recurrent layers: continued, forked, swapped, counted in bytes, and restored from files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from outrider.drafters.interface import Ints
from outrider.drafters.none import NoDrafter
from outrider.server.worker.sessions import SessionStore
from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_format import Fits
from outrider.verify.decode import decode, finish
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier
from tests.verify.model.families import build

OPTIONS = DecodeOptions(SamplingParams(temperature=0), max_tokens=6)
LONG = np.arange(3, 93, dtype=np.int32)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return TorchRunner(build("qwen3_5", NAME))


@pytest.fixture
def answer(runner: TorchRunner) -> Callable[[SessionStore, Ints], tuple[str, int, Ints]]:
    """How the session was found, the reused tokens, and the text with the answer, which is that of a new session."""

    def run(store: SessionStore, prompt: Ints) -> tuple[str, int, Ints]:
        session = store.acquire("p", None, prompt)
        assert session is not None
        stream = Stream(session.verifier, NoDrafter(), prompt, OPTIONS)
        tokens = finish(stream).tokens
        assert tokens == decode(Verifier(runner, runner.new_cache()), NoDrafter(), prompt, OPTIONS).tokens
        store.release(session)
        return session.reuse, stream.reused_tokens, np.concatenate([prompt, np.array(tokens, np.int32)])

    return run


def extend(text: Ints, *tokens: int) -> Ints:
    return np.concatenate([text, np.array(tokens, np.int32)])


def test_conversations_continue_and_fork_through_one_slot(
    runner: TorchRunner, answer: Callable[..., tuple[str, int, Ints]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verify.model.recurrent.states.SNAPSHOT_TOKENS", 16)
    store = SessionStore(runner, capacity=4, ttl_seconds=60, slots=1, automatic=True)
    _, _, text = answer(store, LONG[:66])
    reuse, reused, longer = answer(store, extend(text, *range(20, 70)))
    assert (reuse, reused) == ("continued", len(text) - 1)
    reuse, reused, _ = answer(store, extend(longer[:70], 9, 9))
    assert (reuse, reused) == ("forked", 65)  # the state at the end of the first prompt
    assert answer(store, extend(longer, 5))[0] == "continued"


def test_states_count_as_memory(runner: TorchRunner, answer: Callable[..., tuple[str, int, Ints]]) -> None:
    shape = runner.cache_shape.recurrent
    assert shape is not None
    room = 2 * (shape.snapshot_bytes + runner.cache_shape.bytes_for(len(LONG) + 6))
    store = SessionStore(runner, capacity=9, ttl_seconds=60, slots=1, automatic=True, kv_bytes=room)
    for first in range(3):
        answer(store, np.concatenate([[first], LONG]).astype(np.int32))
    assert len(store) == 2


def test_a_session_outlives_its_store(
    runner: TorchRunner, answer: Callable[..., tuple[str, int, Ints]], tmp_path: Path
) -> None:
    def store() -> SessionStore:
        files = SessionFiles(tmp_path, "model", 1 << 30, Fits.of(runner))
        return SessionStore(runner, capacity=4, ttl_seconds=60, automatic=True, files=files)

    first = store()
    _, _, text = answer(first, LONG)
    first.save_all(60)
    assert answer(store(), extend(text, 7, 8))[:2] == ("continued", len(text) - 1)
    [file] = tmp_path.glob("*/*/*")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert answer(store(), extend(text, 7, 8))[:2] == ("new", 0)
