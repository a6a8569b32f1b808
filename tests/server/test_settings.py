"""One name per setting, one order of precedence, and a sentence for every mistake."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from server.settings import Settings, SettingsError, load_settings, parse_flags


def test_flags_beat_environment_beats_file_beats_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("speculation:\n  max_nodes: 1\n  drafter: none\n  trigram: {depth: 6}\nserver: {port: 1}\n")
    monkeypatch.setenv("OUTRIDER_SPECULATION__MAX_NODES", "2")
    monkeypatch.setenv("OUTRIDER_SPECULATION__TRIGRAM__C2", "5")
    monkeypatch.setenv("OUTRIDER_SERVER__PORT", "2")
    settings = load_settings(file, parse_flags(["--server.port", "3", "--speculation.trigram.c1=4"]))
    assert settings.server.port == 3
    assert settings.speculation.max_nodes == 2
    assert settings.speculation.drafter == "none"
    trigram = settings.speculation.trigram
    assert (trigram.depth, trigram.c1, trigram.c2, trigram.iterations) == (6, 4.0, 5.0, 150)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"server.prt": "1"}, "no setting 'server.prt'"),
        ({"speculation.trigram.zz": "1"}, "no setting 'speculation.trigram.zz'"),
        ({"server.port": "x"}, "'server.port' is wrong"),
        ({"speculation.drafter": "magic"}, "'speculation.drafter' is wrong"),
        ({"speculation.trigram.c1": "-1"}, "greater than 0"),
    ],
)
def test_mistakes_are_named(flags: dict[str, str], words: str) -> None:
    with pytest.raises(SettingsError, match=words) as raised:
        load_settings(None, flags)
    assert "\n" not in str(raised.value)


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read"):
        load_settings(tmp_path / "nothing.yaml")
    for content in ("a: [", "just text"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(SettingsError, match=r"bad\.yaml"):
            load_settings(tmp_path / "bad.yaml")


def test_lists_come_as_json() -> None:
    flags = parse_flags(["--speculation.retrieval.datastores", '["a", "b"]'])
    assert load_settings(None, flags).speculation.retrieval.datastores == ("a", "b")
    with pytest.raises(SettingsError, match="JSON list"):
        parse_flags(["--speculation.retrieval.datastores", "[a"])
    with pytest.raises(SettingsError, match="no section"):
        load_settings(None, {"server.port": "1", "server.port.x": "2"})


@pytest.mark.parametrize("arguments", [["--port"], ["--nonsense", "1"], ["stray"], ["--server.port"]])
def test_stray_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SettingsError):
        parse_flags(arguments)


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        load_settings().server.port = 1  # type: ignore[misc]


def test_the_example_files_load() -> None:
    folder = Path(__file__).parents[2] / "configs"
    files = sorted(folder.glob("*.yaml"))
    assert files
    for file in files:
        assert isinstance(load_settings(file), Settings)


def leaves(tree: dict[str, Any], above: str = "") -> set[str]:
    """The dotted names of all values."""
    found: set[str] = set()
    for name, value in tree.items():
        found |= leaves(value, f"{above}{name}.") if isinstance(value, dict) and value else {above + name}
    return found


def test_the_default_file_lists_every_setting_with_its_default() -> None:
    file = Path(__file__).parents[2] / "configs" / "default.yaml"
    assert load_settings(file) == load_settings()
    missing = leaves(load_settings().model_dump()) - leaves(yaml.safe_load(file.read_text()))
    assert missing == {"model.path"}  # there in a comment: it is a path of the installation
