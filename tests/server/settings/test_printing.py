"""The help fits 80 columns without truncation; the effective settings are YAML without secrets."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from outrider.server.settings.printing import effective_yaml, print_reference
from outrider.server.settings.reference import sections
from outrider.server.settings.sources import load_effective


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
