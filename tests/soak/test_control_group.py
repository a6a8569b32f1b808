"""Processes that are started in a group have its limit; the process that starts them has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.control_group import joined, memory_group

LIMITS = "from outrider.verify.system_memory import container_limits; print([limit for limit, _ in container_limits()])"


def test_processes_of_a_group_have_its_limit() -> None:
    own = Path("/proc/self/cgroup")
    before = own.read_text() if own.exists() else ""
    with memory_group(2 << 30) as group:
        if group is None:
            pytest.skip("no control group can be made here")
        with joined(group):
            limits = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True).stdout
        assert str(2 << 30) in limits
        assert own.read_text() == before
    assert not group.exists()
