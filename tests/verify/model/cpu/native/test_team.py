"""Whether a forward runs in all threads is found by what each way takes, also where forwards differ in size."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("habit.cpp")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_jobs_of_several_sizes_keep_the_faster_way(tmp_path: Path) -> None:
    program = tmp_path / "habit"
    subprocess.run(["g++", "-O1", "-std=c++20", "-pthread", str(SOURCE), "-o", str(program)], check=True)
    found = subprocess.run(
        [program, "1.9", "1.4", "1.1", "0.7"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert [line for line in found if "tried" not in line] == ["1.9 together", "1.4 together", "1.1 alone", "0.7 alone"]
    assert len(found) < 4 + 40  # the other way is seldom tried
