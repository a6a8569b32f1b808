"""Sessions of models with sliding windows: what a session has released is not restored, counted, or written to its file."""

import sys
from pathlib import Path

import numpy as np
import pytest

from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_format import Fits
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.cache import kv_cache, windows
from outrider.verify.model.cache.kv_cache import distinct_bytes
from outrider.verify.model.loading import prepare
from outrider.verify.model.torch_runner import TorchRunner
from tests.patches import patched
from tests.server.worker.test_sessions_by_text import Automatic, extend
from tests.verify.model.families import build

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is returned on Linux only")
LONG = np.arange(90, dtype=np.int32) * 7 % 90 + 3
small_pages, small_batches = patched(kv_cache, PAGE_TOKENS=4), patched(windows, MARGIN_TOKENS=8, BATCH_PAGES=1)


@pytest.fixture(scope="module", params=["mistral", "gpt_oss"])
def runner(request: pytest.FixtureRequest) -> TorchRunner:
    """All layers with a window, or half of them."""
    model = build(request.param, NAME)
    prepare(model, None)
    return TorchRunner(model)


def rig_of(runner: TorchRunner, folder: Path) -> Automatic:
    """It reads prompts in parts, which release what is behind the window."""
    return Automatic(runner, chunk=16, slots=1, files=SessionFiles(folder, "model", 1 << 30, Fits.of(runner)))


def test_sessions_continue_and_fork_after_releases(runner: TorchRunner, tmp_path: Path) -> None:
    rig = rig_of(runner, tmp_path)
    _, _, text = rig.answer(LONG)
    assert rig.answer(extend(LONG[:70], 9, 9))[:2] == ("forked", 64)  # the end of a window that is kept
    reuse, reused, text = rig.answer(extend(text, 7, 8))  # after it was swapped out
    assert (reuse, reused) == ("continued", len(LONG) + 5)
    assert rig.answer(extend(text, 9, 9))[:2] == ("continued", len(text) - 1)


def test_a_file_has_no_rows_that_were_released(runner: TorchRunner, tmp_path: Path) -> None:
    first, shape = rig_of(runner, tmp_path), runner.cache_shape
    _, _, text = first.answer(LONG)
    first.store.save_all(60)
    [rows] = [session.verifier.rows for session in first.store._sessions.values()]
    held = distinct_bytes([rows], shape)
    assert held < shape.bytes_for(len(text)) / 1.5
    files = list(tmp_path.glob("*/*/*"))
    assert held < sum(file.stat().st_size for file in files) < held + 12_000 + 300 * len(files)  # headers, digests and names
    second = rig_of(runner, tmp_path)
    [restored] = [session.verifier.rows for session in second.store._sessions.values()]
    assert set(restored.released) == set(rows.released)
    assert distinct_bytes([restored], shape) == held
    assert second.answer(extend(LONG[:70], 9, 9))[:2] == ("forked", 64)
    assert second.answer(extend(text, 7, 8))[:2] == ("continued", len(text) - 1)
    second.store.save_all(60)
    assert rig_of(runner, tmp_path).answer(extend(LONG, 1))[1] >= 64
