"""Measurements are saved whole, or left out."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.verify.findings import save_finding


def test_a_finding_is_saved_in_a_new_folder(tmp_path: Path) -> None:
    file = tmp_path / "costs" / "machine.json"
    for cost in (0.5, 0.25):
        save_finding({"cost": cost}, file)
        assert json.loads(file.read_text()) == {"cost": cost}
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "costs").write_text("a file, where a folder should be")
    save_finding({"cost": 0.5}, tmp_path / "costs" / "machine.json")
    assert [path.name for path in tmp_path.iterdir()] == ["costs"]
    save_finding({"cost": 0.5}, None)
