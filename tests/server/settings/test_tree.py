"""The tree is frozen and quick to import, converts to drafter options, and matches configs/."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.server.settings import Settings, load_settings

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
