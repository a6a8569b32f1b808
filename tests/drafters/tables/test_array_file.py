"""Array files are read back as saved; unusable files are rejected with a sentence."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.drafters.tables import array_file
from outrider.drafters.tables.array_file import ArrayFileError


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    array_file.save(path, "ngram", "f", {"a": np.arange(1000, dtype=np.uint32), "b": np.ones((2, 3), np.uint16)})
    return path


def test_round_trip_is_read_only(saved: Path) -> None:
    file = array_file.load(saved, "ngram", "f")
    assert file.arrays["a"].tolist() == list(range(1000))
    assert file.arrays["b"].shape == (2, 3)
    assert not file.arrays["a"].flags.writeable
    assert not list(saved.parent.glob("*.partial"))


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0{bad}", b"\x02\0\0\0\0\0\0\0[]"])
def test_file_of_another_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ArrayFileError):
        array_file.load(tmp_path / "foreign", "ngram")


def test_truncated_file(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ArrayFileError, match="truncated"):
        array_file.load(saved, "ngram")


def test_a_file_of_another_kind_or_tokenizer(saved: Path) -> None:
    with pytest.raises(ArrayFileError, match="not a version"):
        array_file.load(saved, "suffix")
    with pytest.raises(ArrayFileError, match="another tokenizer; build it again"):
        array_file.load(saved, "ngram", "another")


@pytest.mark.parametrize(
    "change", [{"dtype": "F8"}, {"data_offsets": [8, 0]}, {"data_offsets": None}, {"shape": [7]}, {"shape": "x"}]
)
def test_inconsistent_header(saved: Path, change: dict[str, Any]) -> None:
    data = saved.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["a"] |= change
    changed = json.dumps(header).encode()
    saved.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + size :])
    with pytest.raises(ArrayFileError, match="not a datastore file"):
        array_file.load(saved, "ngram")


def test_saving_does_not_change_a_mapped_file(saved: Path) -> None:
    before = array_file.load(saved, "ngram").arrays["a"]
    array_file.save(saved, "ngram", "f", {"a": np.zeros(3, np.uint32)})
    assert before.tolist() == list(range(1000))
    assert array_file.load(saved, "ngram").arrays["a"].tolist() == [0, 0, 0]
