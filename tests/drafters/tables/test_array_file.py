"""Array files refuse what they cannot trust, each with a sentence."""

from pathlib import Path

import numpy as np
import pytest

from drafters.tables import array_file
from drafters.tables.array_file import ArrayFileError


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


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ArrayFileError, match="cannot be read"):
        array_file.load(tmp_path / "nothing", "ngram")


@pytest.mark.parametrize("content", [b"", b"short", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0{bad}", b"\x02\0\0\0\0\0\0\0[]"])
def test_foreign_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "foreign").write_bytes(content)
    with pytest.raises(ArrayFileError):
        array_file.load(tmp_path / "foreign", "ngram")


def test_truncated_file(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-100])
    with pytest.raises(ArrayFileError, match="truncated"):
        array_file.load(saved, "ngram")


def test_other_kind(saved: Path) -> None:
    with pytest.raises(ArrayFileError, match="not a version"):
        array_file.load(saved, "suffix")
