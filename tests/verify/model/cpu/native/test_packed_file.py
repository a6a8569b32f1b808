"""Packed weights in files: mapped by later starts, whole or absent, and bounded."""

import errno
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from outrider import models
from outrider.verify.errors import ModelError
from outrider.verify.model import backend
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native import packed_file, weights
from outrider.verify.model.cpu.native.packed_file import ALIGNMENT, SHARED_BYTES, SUFFIX, HugePages, PackedFile, make_room
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from tests.patches import patched

TOKENS = ForwardBatch.chain(np.arange(5, 40))
small_files = patched(packed_file, LEAST_BYTES=0)


def wait_written() -> None:
    for thread in threading.enumerate():
        if thread.name == "outrider-packed":
            thread.join()


def load(folder: Path | None, **options: object) -> ModelRunner:
    """The embedded model, started, once what it keeps is written."""
    found = backend.load_model(LoadOptions(str(models.TARGET), device="cpu", packed_folder=folder, **options))  # type: ignore[arg-type]
    wait_written()
    return found


def logits(runner: ModelRunner) -> np.ndarray:
    return np.array(runner.forward(runner.new_cache(), TOKENS))


def test_a_later_start_maps_what_an_earlier_one_has_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And serves from the file that it writes."""
    plain, first = load(None), load(tmp_path)
    (file,) = tmp_path.iterdir()
    assert first.maps_weights and not plain.maps_weights and file.stat().st_size == first.held_bytes
    monkeypatch.setattr(weights, "pack_blocks", lambda *_: pytest.fail("packed again"))
    later = load(tmp_path)
    assert [*tmp_path.iterdir()] == [file]
    file.unlink()  # the mappings stay
    assert all(np.array_equal(logits(each), logits(plain)) for each in (first, later))


def test_another_rounding_has_a_file_of_its_own(tmp_path: Path) -> None:
    found = [logits(load(tmp_path, quantize=kind)) for kind in ("none", "int8", "none", "int8")]
    assert len([*tmp_path.iterdir()]) == 2
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])


def test_a_file_that_is_too_short_is_one_sentence(tmp_path: Path) -> None:
    load(tmp_path)
    (file,) = tmp_path.iterdir()
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"packed' is damaged; remove it\.$"):
        load(tmp_path)


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level("INFO", "outrider.worker"):
        assert np.array_equal(logits(load(tmp_path / "file")), logits(load(None)))
    assert "the packed weights are not kept" in caplog.text


def test_a_disk_that_fills_up_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logits(load(None))
    written, write = list[int](), os.write

    def fills_up(file: int, content: memoryview) -> int:
        if sum(written) > 10 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(write(file, content[: 1 << 20]))  # a disk may also take a part
        return written[-1]

    monkeypatch.setattr(os, "write", fills_up)
    runner = load(tmp_path)
    assert written and not [*tmp_path.iterdir()] and not runner.maps_weights
    assert np.array_equal(logits(runner), expected)


def test_weights_that_take_more_than_their_share_of_the_disk_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(load(None, dtype="float32"))
    size = sum(each.stat().st_size for each in Path(models.TARGET).glob("*.safetensors"))
    monkeypatch.setattr(packed_file, "MOST_BYTES", size + 1000)  # the packed form is larger than the files
    runner = load(tmp_path, dtype="float32")
    assert not [*tmp_path.iterdir()] and not runner.maps_weights
    assert np.array_equal(logits(runner), expected)


def test_a_disk_that_loses_what_was_written_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fails)
    load(tmp_path)
    assert not [*tmp_path.iterdir()]
    assert "restart with another model.packed_folder, or null" in caplog.text


def test_what_interrupted_writers_have_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_bytes(bytes(1000))
    load(tmp_path)
    assert [each.suffix for each in tmp_path.iterdir()] == [SUFFIX]


def test_two_first_starts_at_once_both_keep_their_files(tmp_path: Path) -> None:
    content = bytes(range(256)) * 16
    with PackedFile(tmp_path / f"slow{SUFFIX}", len(content)) as slow:
        slow.take(len(content), lambda place: iter([np.frombuffer(content, np.uint8)]))
        load(tmp_path)
    wait_written()
    assert {each.suffix for each in tmp_path.iterdir()} == {SUFFIX} and len([*tmp_path.iterdir()]) == 2
    assert (tmp_path / f"slow{SUFFIX}").read_bytes() == content


def test_a_file_that_is_removed_before_it_is_locked_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mkstemp = list[str](), tempfile.mkstemp

    def removed_once(suffix: str, dir: Path) -> tuple[int, str]:
        file, name = mkstemp(suffix, dir=dir)
        if not made:
            os.unlink(name)
        made.append(name)
        return file, name

    monkeypatch.setattr(tempfile, "mkstemp", removed_once)
    load(tmp_path)
    assert len(made) == 2 and [each.suffix for each in tmp_path.iterdir()] == [SUFFIX]


def test_files_that_were_used_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "MOST_BYTES", 100)
    for age, name in enumerate(("a", "b", "c")):
        (tmp_path / f"{name}{SUFFIX}").write_bytes(bytes(30))
        os.utime(tmp_path / f"{name}{SUFFIX}", (1000 - age, 1000 - age))
    (tmp_path / "x.partial").write_bytes(b"")
    make_room(tmp_path, 50)
    assert [each.name for each in tmp_path.iterdir()] == [f"a{SUFFIX}"]


SIZES = (1, 63, 64, 65, 5000, 3 << 20, SHARED_BYTES // 2, SHARED_BYTES // 2 + 1, 40 << 20, 0)


def test_parts_are_aligned_zero_and_apart() -> None:
    memory = HugePages()
    with ThreadPoolExecutor(4) as pool:
        parts = list(pool.map(memory.take, SIZES * 3))
    assert [len(part) for part in parts] == [*SIZES * 3]
    assert all(part.ctypes.data % ALIGNMENT == 0 and not part.any() for part in parts)
    for number, part in enumerate(parts):
        part.fill(number % 256)
    assert all((part == number % 256).all() for number, part in enumerate(parts))
