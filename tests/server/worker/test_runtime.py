"""The memory's figures, the number of threads, and the draft budget of a request."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider import models
from outrider.drafters.interface import MAX_NODES
from outrider.drafters.model.pair import Pair
from outrider.server.settings import load_settings
from outrider.server.worker import runtime
from outrider.server.worker.draft import load_draft, share_draft
from outrider.server.worker.memory_plan import MemoryPlan
from outrider.server.worker.resources import LearnedTexts, Tables, load_resources
from outrider.server.worker.runtime import load, load_target, memory_figures, shared_options
from outrider.verify.cost import CostCurve
from outrider.verify.errors import ModelError
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.tokenizer import load_tokenizer
from tests.server.worker.fakes import tiny_runtime
from tests.verify.heads.checkpoints import save_eagle


def test_a_draft_model_is_charged_to_its_own_device(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's plan holds for a draft model on its device; on another one, what that holds."""
    plan = MemoryPlan(4, 100_000, caches=4, pages=1000)
    assert runtime.plan_draft(tiny_runner, None, plan) == plan
    assert runtime.plan_draft(tiny_runner, tiny_runner, plan) == plan
    target = cast(Any, SimpleNamespace(cache_shape=replace(tiny_runner.cache_shape, device=torch.device("cuda", 0))))
    monkeypatch.setattr(tiny_runner, "model_tokens", 200_000)
    row = tiny_runner.cache_shape.bytes_for(1)
    for tokens, context in ((1_000_000, 100_000), (50_000, 38_912)):
        monkeypatch.setattr(runtime, "free_bytes", lambda _, tokens=tokens: tokens * row)
        assert runtime.plan_draft(target, tiny_runner, plan).context_tokens == context
    assert [record.message.partition(", so")[0] for record in caplog.records] == [
        "The memory of cpu holds the draft model's KV cache for 38912 tokens"
    ]
    monkeypatch.setattr(runtime, "free_bytes", lambda _: 100 * row)
    with pytest.raises(ModelError, match=r"of the memory of cpu are free .* serve a smaller or quantised model\.$"):
        runtime.plan_draft(target, tiny_runner, plan)


def test_a_head_makes_the_target_keep_its_hidden_states(tmp_path: Path) -> None:
    settings = load_settings(None, {"draft_model.path": str(save_eagle(tmp_path, target_size=256)), "model.device": "cpu"})
    target = load_target(settings)
    before = memory_figures(target, None)[0].slot_bytes
    head, differences = load_draft(
        settings, shared_options(settings, settings.draft_model), load_tokenizer(str(models.TARGET)), target
    )
    assert isinstance(head, HeadModel)
    kept = target.new_cache().hidden
    assert kept is not None
    states = kept.capacity * 256 * target.cache_shape.dtype.itemsize
    assert memory_figures(target, None)[0].slot_bytes == before + states
    assert memory_figures(target, head)[0].slot_bytes > before + states
    assert isinstance(share_draft(head, differences, target, 2, Pair(1.0, 0.1)), HeadRunner)


def test_the_budget_of_a_request(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_runtime(tiny_runner, load_settings())
    made.curve = CostCurve((0, MAX_NODES), (1,), ((0.1, 0.2),))
    assert made.budget(7) == (7, None)
    assert made.budget("auto") == (MAX_NODES, made.curve)
    monkeypatch.setattr(TorchRunner, "draft_nodes", 71)
    assert made.budget(MAX_NODES) == (71, None)
    assert made.budget(7) == (7, None)
    assert made.resources_of("anyone") is made.resources


def test_a_keys_datastore_is_used_only_for_its_requests(tmp_path: Path) -> None:
    from outrider.server.datastore_builder import build_suffix

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    build_suffix([tmp_path / "text.txt"], tmp_path / "store", str(models.TARGET), append=False)
    flags = {
        "auth.keys": {"one": {"key": "long-enough", "datastores": [str(tmp_path / "store")]}, "two": "long-enough-too"},
        "speculation.max_nodes": 4,
    }
    made = load(load_settings(None, flags))
    assert [len(made.resources_of(name).corpus) for name in ("one", "two")] == [2, 1]  # one of them is a request's choice
    assert made.curve is None


def test_each_principal_learns_from_its_own_sessions(tiny_runner: TorchRunner) -> None:
    settings = load_settings(None, {"sessions.learn": "key"})
    shared, own = load_resources(settings, Tables(lambda: "f", 100))
    made = replace(tiny_runtime(tiny_runner, settings), resources=shared, own_resources=own, learned=LearnedTexts(100, 100))
    made.learn("one", "session", np.arange(9, dtype=np.int32))
    sizes = {name: [block.size for block in made.resources_of(name).corpus] for name in ("one", "two")}
    assert sizes == {"one": [0, 10], "two": [0, 0]}
    assert len(shared.corpus) == 2  # drafters have room for the same number of blocks
