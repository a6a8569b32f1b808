"""What a worker does before it imports torch."""

import os
from pathlib import Path

import pytest

from outrider.server.imports import keep_compiled

FOLDERS = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FOLDERS:
        monkeypatch.setenv(name, "")  # so that it is restored
        del os.environ[name]


def test_compiled_kernels_are_kept_beside_what_was_measured(tmp_path: Path) -> None:
    keep_compiled(tmp_path / "new")
    assert [os.environ[name] for name in FOLDERS] == [str(tmp_path / "new" / name) for name in ("triton", "inductor")]
    assert (tmp_path / "new").is_dir()


def test_but_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    keep_compiled(tmp_path)
    assert [os.environ[name] for name in FOLDERS] == ["/elsewhere", str(tmp_path / "inductor")]


def test_without_a_folder_that_can_be_written_they_are_where_they_were(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (None, tmp_path / "file" / "below"):
        keep_compiled(folder)
        assert not any(name in os.environ for name in FOLDERS)
