"""The tree is frozen, quick to import and printed without secrets; it converts to drafter options and matches configs/."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from outrider.server.settings import DraftModel, Settings, load_settings
from outrider.server.settings.printing import effective_yaml, print_reference
from outrider.server.settings.reference import sections
from outrider.server.settings.sources import load_effective

CONFIGS = Path(__file__).parents[3] / "configs"


def leaves(tree: dict[str, Any], above: str = "") -> set[str]:
    """The dotted names of all values."""
    found: set[str] = set()
    for name, value in tree.items():
        found |= leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else {above + name}
    return found


def test_the_settings_import_nothing_heavy() -> None:
    script = "import sys, outrider.server.settings; print(*{'torch', 'transformers', 'fastapi'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_the_example_files_load() -> None:
    files = sorted(CONFIGS.glob("*.yaml"))
    assert files
    for file in files:
        assert isinstance(load_settings(file), Settings)


def test_the_default_file_lists_every_setting_with_its_default() -> None:
    file = CONFIGS / "default.yaml"
    assert load_settings(file) == load_settings()
    missing = leaves(load_settings().model_dump()) - leaves(yaml.safe_load(file.read_text()))
    assert missing == {"model.path"}  # in a comment: the default is a path of the installation


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({}, "outrider-embedded"),
        ({"model.path": "Qwen/Qwen3-8B"}, "Qwen3-8B"),
        ({"model.path": "SmolLM2-135M-Instruct.Q4_1.gguf"}, "SmolLM2-135M-Instruct"),
        ({"model.path": "./my-model", "model.name": "mine"}, "mine"),
    ],
)
def test_the_served_name_follows_the_path(flags: dict[str, str], name: str) -> None:
    assert load_settings(None, flags).model.served_name == name


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ({}, True),
        ({"sessions.automatic": "off"}, False),
        ({"server.host": "0.0.0.0", "auth.open": "true"}, False),
        ({"server.host": "0.0.0.0", "auth.open": "true", "sessions.automatic": "on"}, True),
        ({"server.host": "0.0.0.0", "auth.keys": {"alice": "alices-secret"}}, True),
    ],
)
def test_sessions_are_found_by_text_unless_strangers_share_a_principal(flags: dict[str, Any], found: bool) -> None:
    assert load_settings(None, flags).finds_sessions_by_text == found
    assert load_settings(None, flags | {"sessions.learn": "key"}).learns_from_sessions == found
    assert not load_settings(None, flags).learns_from_sessions


def test_each_value_has_its_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, keys = tmp_path / "c.yaml", tmp_path / "keys.yaml"
    file.write_text("model: {dtype: float32}\nspeculation: {retrieval: {datastores: [a]}}\n")
    keys.write_text("bob: sk-bobs-secret\n")
    monkeypatch.setenv("OUTRIDER_AUTH__KEYS", '{"alice": "sk-alices-secret"}')
    monkeypatch.setenv("OUTRIDER_SPECULATION__TRIGRAM__TABLE", "t")
    text = effective_yaml(load_effective(file, {"server.port": 9, "auth.file": str(keys)}))
    lines = {line.strip() for line in text.splitlines()}
    assert {
        "port: 9  # flag",
        "dtype: float32  # file",
        "datastores: [a]  # file",
        "table: t  # environment",
        "drafter: fusion  # default",
        "key: '**********'  # environment",
        "key: '**********'  # file",
    } <= lines
    assert "secret" not in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_reference_is_printed_without_truncation(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    print_reference(console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(len(line) for line in lines) <= width
    words = " ".join(line.strip("│ ") for line in lines)
    assert "…" not in words
    for section in sections():
        assert section.description in words
        for setting in section.settings:
            assert f"--{setting.name} " in words
            assert setting.description in words


def test_a_draft_model_may_be_pinned(tmp_path: Path) -> None:
    assert DraftModel(path="owner/name@v2").place == ("owner/name", "v2")
    assert DraftModel(path="owner/name").place == ("owner/name", "main")
    (folder := tmp_path / "name@v2").mkdir()
    assert DraftModel(path=str(folder)).place == (str(folder), "main")
