"""Damaged and foreign files cost a log line and the session, never an answer."""

import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from outrider.drafters.sequence import Ints
from outrider.server.worker.storage import session_format
from outrider.server.worker.storage.session_format import page_path
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.storage.stores import LONG, answer, content_of, files_in, new_store, page_of, save, sessions_in

pytestmark = pytest.mark.usefixtures("page_tokens")


@pytest.mark.parametrize("damage", ["header", "cut", "rows", "text"])
def test_a_damaged_file_costs_one_log_line(
    tiny_runner: TorchRunner, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG)
    save(store)
    [file] = sessions_in(tmp_path)
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    match damage:
        case "header":
            content[9] ^= 0xFF
        case "cut":
            content = content[:-100]
        case "text":
            content[-1] ^= 0xFF
        case "rows":
            content[start + (len(content) - start) // 2] ^= 0xFF
    file.write_bytes(content)
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        fresh = new_store(tiny_runner, tmp_path, slots=1)
        reused, _, _ = answer(fresh, np.concatenate([text, [7]]).astype(np.int32))
    if reused:  # the damage is in a drafter's table, which changes no answer
        assert damage in ("rows", "text")
    else:
        assert len(caplog.records) == 1
    assert fresh._slots.free + len(fresh) == 1


@pytest.mark.parametrize("change", ["token", "missing", "principal", "path"])
def test_a_file_that_is_not_a_session_of_its_folder_is_ignored(
    tiny_runner: TorchRunner, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    match change:
        case "token":
            tensors["text"][3] = 1 << 30
            labels["text"] = session_format.text_digest(tensors["text"].numpy())
        case "missing":
            del tensors["rows"]
        case "principal":
            labels["principal"] = "another"
        case "path":
            labels["pages"] = " ".join(["../other"] * max(1, len(labels["pages"].split())))
    save_file(tensors, file, labels)
    check_is_ignored(tiny_runner, tmp_path, text, caplog)


def check_is_ignored(runner: TorchRunner, folder: Path, text: Ints, caplog: pytest.LogCaptureFixture) -> None:
    """A session costs one log line, and is not continued."""
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        fresh = new_store(runner, folder, slots=1)
        reused, _, _ = answer(fresh, np.concatenate([text, [7]]).astype(np.int32), "a")
    used = sum(not session.verifier.is_swapped_out for session in fresh._sessions.values())
    assert (reused, fresh._slots.free + used) == (0, 1)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("damage", ["changed", "cut", "removed", "another's"])
def test_a_damaged_page_costs_the_sessions_that_name_it_and_is_written_again(
    tiny_runner: TorchRunner, tmp_path: Path, page_tokens: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    if page_tokens > len(LONG):
        pytest.skip("the text has no whole page")
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    answer(store, LONG[::-1].copy(), "b")
    save(store)
    _, labels = content_of(page_of("a", tmp_path))
    first, second = (page_path(page_of("a", tmp_path).parent, digest) for digest in labels["pages"].split()[:2])
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    match damage:
        case "changed":
            first.write_bytes(content)
        case "cut":
            first.write_bytes(content[:-1])
        case "removed":
            first.unlink()
        case "another's":
            first.write_bytes(second.read_bytes())
    check_is_ignored(tiny_runner, tmp_path, text, caplog)
    healed = new_store(tiny_runner, tmp_path)
    assert answer(healed, np.concatenate([LONG[::-1], [7]]).astype(np.int32), "b")[0] >= len(LONG) - 1  # the other session
    answer(healed, LONG, "a")
    save(healed)
    assert answer(new_store(tiny_runner, tmp_path), np.concatenate([text, [7]]).astype(np.int32), "a")[0] >= len(text) - 1


def flip_byte(array: torch.Tensor) -> torch.Tensor:
    array.view(-1).view(torch.uint8)[0] ^= 1
    return array


@pytest.mark.parametrize("change", [flip_byte, torch.Tensor.bfloat16])
def test_damaged_arrays_of_a_drafter_are_not_used(
    tiny_runner: TorchRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """The text and the rows are; numpy has no bfloat16."""
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG, "a")
    save(store)
    [file] = sessions_in(tmp_path)
    tensors, labels = content_of(file)
    name = max((name for name in tensors if name.startswith("trigram:")), key=lambda name: tensors[name].numel())
    tensors[name] = change(tensors[name])
    save_file(tensors, file, labels)
    longer = np.concatenate([text, [7]]).astype(np.int32)
    reused, _, tables = answer(new_store(tiny_runner, tmp_path), longer, "a")
    _, _, unlearned = answer(new_store(tiny_runner, tmp_path / "empty"), longer)
    assert reused >= len(text) - 1 and len(caplog.messages) == 1
    assert all((tables[key] == unlearned[key]).all() for key in unlearned)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs POSIX")
def test_pipes_and_holes_cost_a_log_line_and_no_wait(
    tiny_runner: TorchRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = new_store(tiny_runner, tmp_path)
    answer(store, LONG)
    save(store)
    [file] = sessions_in(tmp_path)
    hole = file.with_name(f"{'0' * 32}.session")
    hole.write_bytes((1 << 40).to_bytes(8, "little"))
    os.truncate(hole, 1 << 41)
    [lock] = tmp_path.rglob(".lock")
    for path in (file, lock, file.with_name("pipe.partial")):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    with caplog.at_level(logging.WARNING, "outrider.worker"):
        fresh = new_store(tiny_runner, tmp_path)
        assert answer(fresh, LONG)[0] == 0
        save(fresh)
    assert "is not a regular file" in caplog.text and "header is too large" in caplog.text


def test_a_full_disk_costs_a_log_line_until_there_is_room(
    tiny_runner: TorchRunner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on the sizes of files imitates it: `write` fails midway, as it does without space."""
    store = new_store(tiny_runner, tmp_path)
    _, text, _ = answer(store, LONG)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        save(store)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert "could not be saved" in caplog.text and not files_in(tmp_path)
    _, text, _ = answer(store, text)
    save(store)
    assert answer(new_store(tiny_runner, tmp_path), np.append(text, np.int32(7)))[0] == len(text) - 1
