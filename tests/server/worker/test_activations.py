"""What activations take of a GPU: measured beside weights and caches, kept, and left free by the next start's plan."""

from pathlib import Path
from typing import Any

import pytest

from outrider.server.worker import activations
from outrider.server.worker.activations import MARGIN, Activations
from outrider.server.worker.memory_plan import MemoryFigures


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes in use by device."""
    found = {"cuda:0": 5000, "cuda:1": 7000}
    monkeypatch.setattr(activations, "peak_bytes", lambda device, restarts=False: found[device])
    return found


def test_the_most_is_kept_for_the_next_start(used: dict[str, int], tmp_path: Path) -> None:
    devices: dict[str, Any] = {name: name for name in used}
    first = Activations(devices, tmp_path / "file.json")
    assert first.reserved("cuda:0") is None
    for beyond in (900, 400):
        used["cuda:0"] = 5000 + 2000 + beyond
        first.observe({"cuda:0": 2000, "cuda:1": 2000})
    later = Activations(devices, tmp_path / "file.json")
    assert later.reserved("cuda:0") == MARGIN * 900
    assert later.reserved("cuda:1") is None  # nothing beyond its caches


@pytest.mark.parametrize("content", ["", "[]", '{"cuda:0": "x"}', '{"cuda:0": -1}'])
def test_a_file_that_is_none(content: str, used: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    assert Activations({"cuda:0": "cuda:0"}, tmp_path / "file.json").reserved("cuda:0") is None


def test_the_plan_leaves_what_was_measured_but_at_most_the_share() -> None:
    figures = {reserved: MemoryFigures(1000, 1, 100, reserved_bytes=reserved).budget_bytes for reserved in (None, 50, 500)}
    assert figures == {None: 800, 50: 950, 500: 800}
