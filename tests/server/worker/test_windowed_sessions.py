"""Sessions of models with sliding windows: what a session has released is not restored, counted, or written to its file."""

import sys
from collections.abc import Iterator
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
from outrider.verify.model.cache import paging, windows
from outrider.verify.model.cache.paging import distinct_bytes
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier
from tests.verify.model.test_architectures import make

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is returned on Linux only")
OPTIONS = DecodeOptions(SamplingParams(temperature=0), max_tokens=4)
LONG = np.arange(90, dtype=np.int32) * 7 % 90 + 3


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "PAGE_TOKENS", 4)
        patch.setattr(windows, "MARGIN_TOKENS", 8)
        patch.setattr(windows, "BATCH_PAGES", 1)
        yield


@pytest.fixture(scope="module", params=["mistral", "gpt_oss"])
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    """All layers with a window, or half of them."""
    model = make(request.param, NAME)
    prepare(model, None)
    return TorchRunner(model)


def store_of(runner: TorchRunner, folder: Path, slots: int = 1) -> SessionStore:
    files = SessionFiles(folder, "model", 1 << 30, Fits.of(runner))
    return SessionStore(runner, capacity=4, ttl_seconds=60, slots=slots, automatic=True, files=files)


def answer(runner: TorchRunner, store: SessionStore, prompt: Ints, chunk: int = 16) -> tuple[str, int, Ints]:
    """How the session was found, the reused tokens, and the text with the answer, which is that of a new session."""
    session = store.acquire("p", None, prompt)
    assert session is not None
    stream = Stream(session.verifier, NoDrafter(), prompt, OPTIONS)
    while (part := session.verifier.chunk(chunk)) is not None:
        session.verifier.commit_chunk(part, runner.forward_all([part])[0])
    tokens = finish(stream).tokens
    assert tokens == decode(Verifier(runner, runner.new_cache()), NoDrafter(), prompt, OPTIONS).tokens
    store.release(session)
    return session.reuse, stream.reused_tokens, np.concatenate([prompt, np.array(tokens, np.int32)])


def extend(text: Ints, *tokens: int) -> Ints:
    return np.concatenate([text, np.array(tokens, np.int32)])


def test_sessions_continue_and_fork_after_releases(runner: TorchRunner, tmp_path: Path) -> None:
    store = store_of(runner, tmp_path)
    _, _, text = answer(runner, store, LONG)
    assert answer(runner, store, extend(LONG[:70], 9, 9))[:2] == ("forked", 64)  # the end of a window that is kept
    reuse, reused, text = answer(runner, store, extend(text, 7, 8))  # after it was swapped out
    assert (reuse, reused) == ("continued", len(LONG) + 3)
    assert answer(runner, store, extend(text, 9, 9))[:2] == ("continued", len(text) - 1)


def test_a_file_has_no_rows_that_were_released(runner: TorchRunner, tmp_path: Path) -> None:
    first, shape = store_of(runner, tmp_path), runner.cache_shape
    _, _, text = answer(runner, first, LONG)
    first.save_all(60)
    [rows] = [session.verifier.rows for session in first._sessions.values()]
    held = distinct_bytes([rows], shape)
    assert held < shape.bytes_for(len(text)) / 1.5
    files = list(tmp_path.glob("*/*/*"))
    assert held < sum(file.stat().st_size for file in files) < held + 12_000 + 300 * len(files)  # headers, digests and names
    second = store_of(runner, tmp_path)
    [restored] = [session.verifier.rows for session in second._sessions.values()]
    assert set(restored.released) == set(rows.released)
    assert distinct_bytes([restored], shape) == held
    assert answer(runner, second, extend(LONG[:70], 9, 9))[:2] == ("forked", 64)
    assert answer(runner, second, extend(text, 7, 8))[:2] == ("continued", len(text) - 1)
    second.save_all(60)
    assert answer(runner, store_of(runner, tmp_path), extend(LONG, 1))[1] >= 64
