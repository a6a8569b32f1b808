"""The real process that prepares pictures: answers, and its end."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.server.pictures.messages import Load, Loaded, Prepare, Prepared, decode_answer, encode
from outrider.server.pictures.process import PictureProcess, ProcessEnded
from tests.server.pictures.models import picture, write_qwen

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs POSIX")


@pytest.fixture
def process() -> Iterator[PictureProcess]:
    found = PictureProcess()
    yield found
    found.close()


def test_a_picture_is_prepared(process: PictureProcess, tmp_path: Path) -> None:
    write_qwen(tmp_path)
    assert isinstance(decode_answer(process.ask(encode(Load(str(tmp_path), "main", False)))), Loaded)
    answer = decode_answer(process.ask(encode(Prepare(picture(1), 1_000_000, 1 << 20))))
    assert isinstance(answer, Prepared) and answer.tokens
    os.kill(process.pid, signal.SIGPROF)  # as its limit of processor time does
    with pytest.raises(ProcessEnded) as raised:
        process.ask(encode(Prepare(picture(1), 1_000_000, 1 << 20)))
    assert raised.value.was_slow


def test_a_process_that_is_silent_is_killed(process: PictureProcess) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(ProcessEnded) as raised:
        process.ask(encode(Load("none", "main", False)), 0.01)
    assert not raised.value.was_slow and process.close() == -signal.SIGKILL
