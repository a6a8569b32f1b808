"""Trouble in a folder of sessions: files are damaged in place, and workers cannot write while the disk is full."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from tests.soak.attacks import folder
from tests.soak.attacks.folder import DAMAGES, FolderTrouble

WRITER = """
import sys
for line in sys.stdin:
    try:
        with open(sys.argv[1], "wb", buffering=0) as file:
            print(all(file.write(b"x" * 2048) == 2048 for _ in range(4)), flush=True)
    except OSError:
        print("full", flush=True)
"""


def test_files_are_damaged_in_their_place(tmp_path: Path) -> None:
    trouble = FolderTrouble(tmp_path, [], seed=0)
    trouble.damage()  # there are none yet
    files = [tmp_path / "model" / "owner" / f"{number}.session" for number in range(40)]
    files[0].parent.mkdir(parents=True)
    for file in files:
        file.write_bytes(os.urandom(20_000))
    before = {file: file.read_bytes() for file in files}
    for _ in range(100):
        trouble.damage()
    changed = [file for file in files if not file.exists() or file.read_bytes() != before[file]]
    assert len(changed) > 20
    assert {damage.__name__ for damage in DAMAGES} | {"swapped", "removed"} <= set(trouble.counts)


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_changes_a_file(damage: Callable[[bytes, random.Random], bytes]) -> None:
    data = os.urandom(20_000)
    assert damage(data, random.Random(1)) != data
    damage(b"", random.Random(1))


def test_a_worker_cannot_write_to_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "file")]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        monkeypatch.setattr(folder, "find_worker", lambda server_id: process.pid if server_id == 7 else None)
        trouble = FolderTrouble(tmp_path, [7, 8], seed=0)
        found = []
        for is_full in (False, True, False):
            trouble.limit(is_full)
            process.stdin.write("\n")
            found.append(process.stdout.readline().strip())
        process.stdin.close()
    assert found == ["True", "full", "True"] and trouble.counts["full"] == 1
