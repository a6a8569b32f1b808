"""Sessions of models with recurrent layers: continued, forked, swapped, counted in bytes, and restored from files."""

from pathlib import Path

import numpy as np
import pytest

from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_format import Fits
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.test_sessions_by_text import Automatic, extend
from tests.verify.model.families import build

LONG = np.arange(3, 93, dtype=np.int32)


@pytest.fixture(scope="module")
def runner() -> TorchRunner:
    return TorchRunner(build("qwen3_5", NAME))


def test_conversations_continue_and_fork_through_one_slot(runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.verify.model.recurrent.states.SNAPSHOT_TOKENS", 16)
    rig = Automatic(runner, slots=1)
    _, _, text = rig.answer(LONG[:66])
    reuse, reused, longer = rig.answer(extend(text, *range(20, 70)))
    assert (reuse, reused) == ("continued", len(text) - 1)
    reuse, reused, _ = rig.answer(extend(longer[:70], 9, 9))
    assert (reuse, reused) == ("forked", 65)  # the state at the end of the first prompt
    assert rig.answer(extend(longer, 5))[0] == "continued"


def test_states_count_as_memory(runner: TorchRunner) -> None:
    shape = runner.cache_shape.recurrent
    assert shape is not None
    room = 2 * (shape.snapshot_bytes + runner.cache_shape.bytes_for(len(LONG) + 6))
    rig = Automatic(runner, capacity=9, slots=1, kv_bytes=room)
    for first in range(3):
        rig.answer(np.concatenate([[first], LONG]).astype(np.int32))
    assert len(rig.store) == 2


def test_a_session_outlives_its_store(runner: TorchRunner, tmp_path: Path) -> None:
    def rig() -> Automatic:
        return Automatic(runner, files=SessionFiles(tmp_path, "model", 1 << 30, Fits.of(runner)))

    first = rig()
    _, _, text = first.answer(LONG)
    first.store.save_all(60)
    assert rig().answer(extend(text, 7, 8))[:2] == ("continued", len(text) - 1)
    [file] = tmp_path.glob("*/*/*")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    assert rig().answer(extend(text, 7, 8))[:2] == ("new", 0)
