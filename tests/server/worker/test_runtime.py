"""The number of KV cache slots, the number of threads, and the draft budget of a request."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import models
from drafters.interface import MAX_NODES
from server.settings import load_settings
from server.worker import runtime
from server.worker.runtime import checkpoint_bytes, default_threads, load, plan_slots
from tests.server.worker.fakes import tiny_runtime
from verify.cost import CostCurve
from verify.errors import ModelError
from verify.model.runner import ModelRunner


def slots(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, fitting: int, **flags: Any) -> int:
    monkeypatch.setattr(runtime, "slots_that_fit", lambda *_: fitting)
    return plan_slots(runner, None, load_settings(None, flags))


def test_slots_follow_memory_and_settings(tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {"sessions.capacity": 8, "scheduling.max_active": 4}
    assert slots(tiny_runner, monkeypatch, 100, **flags) == 12  # sessions.capacity + scheduling.max_active
    assert slots(tiny_runner, monkeypatch, 6, **flags) == 6
    assert slots(tiny_runner, monkeypatch, 100, **flags, **{"sessions.slots": 5}) == 5
    with pytest.raises(ModelError, match=r"4 concurrent requests need 4 KV caches of .* GB each, but 3 fit"):
        slots(tiny_runner, monkeypatch, 3, **flags)
    with pytest.raises(ModelError, match=r"raise sessions\.slots"):
        slots(tiny_runner, monkeypatch, 100, **flags, **{"sessions.slots": 2})


def test_each_slot_reserves_memory_for_the_draft_model(tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []

    def fitting(shape: object, positions: int, draft_bytes: int) -> int:
        reserved.append(draft_bytes)
        return 100

    monkeypatch.setattr(runtime, "slots_that_fit", fitting)
    for draft in (None, tiny_runner):
        plan_slots(tiny_runner, draft, load_settings())
    assert reserved == [0, tiny_runner.cache_shape.bytes_for(tiny_runner.context_tokens)]


def test_default_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)

    def threads(weight_bytes: int, reserved: int = 0) -> int:
        return default_threads(cast(Any, SimpleNamespace(weight_bytes=weight_bytes)), reserved)

    assert threads(10_000_000) == 1
    assert threads(10_000_000_000) == 8
    assert threads(10_000_000_000, reserved=2) == 6
    assert threads(10_000_000_000, reserved=9) == 1


def test_checkpoint_bytes() -> None:
    assert 1_000_000 < checkpoint_bytes(str(models.TARGET)) < runtime.SMALL_MODEL_BYTES
    assert checkpoint_bytes("Qwen/Qwen3-8B") == float("inf")


def test_the_budget_of_a_request(tiny_runner: ModelRunner) -> None:
    made = tiny_runtime(tiny_runner, load_settings())
    made.curve = CostCurve((0, MAX_NODES), (1,), ((0.1, 0.2),))
    assert made.budget(7) == {"max_nodes": 7, "curve": None}
    assert made.budget("auto") == {"max_nodes": MAX_NODES, "curve": made.curve}
    assert made.resources_of("anyone") is made.resources


def test_a_keys_datastore_is_used_only_for_its_requests(tmp_path: Path) -> None:
    from server.datastore_builder import build_suffix

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    build_suffix([tmp_path / "text.txt"], tmp_path / "store", str(models.TARGET), append=False)
    flags = {
        "auth.keys": {"one": {"key": "long-enough", "datastores": [str(tmp_path / "store")]}, "two": "long-enough-too"},
        "speculation.max_nodes": 4,
        "model.trace": False,
    }
    made = load(load_settings(None, flags))
    assert made.kernels.ready
    assert len(made.resources_of("one").corpus) == 1
    assert not made.resources_of("two").corpus
    assert made.curve is None
