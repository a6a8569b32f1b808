"""The free memory is that of the process: the machine's, or its container's."""

import os
from pathlib import Path

import pytest
import torch

from outrider.verify import system_memory
from outrider.verify.model.memory import free_bytes
from outrider.verify.system_memory import container_limits, system_bytes

GB = 1 << 30
V2 = {"memory.max": "{limit}", "memory.current": "{used}", "memory.stat": "anon 5\ninactive_file {cached}\n"}
V1 = {
    "memory.limit_in_bytes": "{limit}",
    "memory.usage_in_bytes": "{used}",
    "memory.stat": "inactive_file 7\ntotal_inactive_file {cached}\n",
}


def write(folder: Path, files: dict[str, str], **values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text.format(**values))


def root_of(tmp_path: Path, cgroup: str) -> Path:
    write(tmp_path / "proc/self", {"cgroup": cgroup})
    write(tmp_path / "proc", {"meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 10 kB\nMemAvailable: {48 << 20} kB\n"})
    return tmp_path


def test_the_free_memory_counts_the_page_cache(tmp_path: Path) -> None:
    assert system_bytes(root_of(tmp_path, "")) == 48 * GB


def test_the_memory_of_systems_without_meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_AVPHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert system_bytes(tmp_path) == 4096000
    assert container_limits(tmp_path) == []


GROUPS = {2: "0::/kubepods/pod1\n", 1: "5:devices:/docker/1\n4:memory:/docker/1\n0::/\n"}


@pytest.mark.parametrize(("version", "folder"), [(2, ""), (2, "kubepods/pod1"), (1, "memory"), (1, "memory/docker/1")])
def test_limits_of_a_container(tmp_path: Path, version: int, folder: str) -> None:
    root = root_of(tmp_path, GROUPS[version])
    write(root / "sys/fs/cgroup" / folder, V2 if version == 2 else V1, limit=4 * GB, used=3 * GB, cached=GB)
    assert container_limits(root) == [(4 * GB, 2 * GB)]
    write(root / "sys/fs/cgroup/kubepods", V2, limit="max", used=9 * GB, cached=0)
    assert container_limits(root) == [(4 * GB, 2 * GB)]


def test_a_container_has_less_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_memory, "container_limits", lambda: [(4 * GB, 3 * GB), (1 << 63, 0)])
    monkeypatch.setattr(system_memory, "system_bytes", lambda: 48 * GB)
    assert free_bytes(torch.device("cpu")) == GB
    monkeypatch.setattr(system_memory, "container_limits", list)
    assert free_bytes(torch.device("cpu")) == 48 * GB
