"""Paths of models: folders, hub ids and GGUF files, and the packages that formats need."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.verify import checkpoint
from outrider.verify.checkpoint import Location, check_packages, locate
from outrider.verify.errors import ModelError


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: SimpleNamespace())


def test_a_file_is_a_folder_and_a_name(tmp_path: Path, installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").touch()
    location = locate(f"{tmp_path}/model.gguf")
    assert location == Location(str(tmp_path), "model.gguf")
    assert location.arguments == {"gguf_file": "model.gguf"}
    monkeypatch.chdir(tmp_path)
    assert locate("model.gguf") == Location(".", "model.gguf")
    assert locate("owner/model-GGUF/model-Q4_0.gguf") == Location("owner/model-GGUF", "model-Q4_0.gguf")
    assert locate("owner/model") == Location("owner/model") and Location("owner/model").arguments == {}


@pytest.mark.parametrize("path", ["missing.gguf", "/no/such/file.gguf", "./a/b.gguf", "a/b/c/d.gguf"])
def test_a_missing_file_is_reported(path: str, installed: None) -> None:
    with pytest.raises(ModelError, match="There is no file"):
        locate(path)


def test_a_folder_of_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "b.gguf").touch()
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelError, match=r"give one of its files, such as .*/a\.gguf"):
        locate(str(tmp_path))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="needs gptqmodel and accelerate; install with pip install gptqmodel acc"):
        check_packages("m", "awq")
    check_packages("m", "unknown")  # transformers knows what it needs
