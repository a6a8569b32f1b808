"""Shared by all tests: models, exact settings, one torch thread, and the distribution of tests over processes."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from outrider.server.settings import Settings, load_settings
from outrider.verify.model.memory import has_graphics
from tests.servers import SHARED_SERVERS, guarded, served

if TYPE_CHECKING:
    from transformers import LlamaConfig

    from outrider.verify.model.torch_runner import TorchRunner

__all__ = ["guarded", "served"]


# PyTorch is imported only where there may be a GPU.
if not has_graphics() or not import_module("torch").cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
# Every run has the same examples; HYPOTHESIS_PROFILE=random looks for others. A first call may compile a kernel.
settings.register_profile("outrider", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "outrider"))

WIDTH = 80  # columns of a terminal
# The groups that take longest start first, so that no process is left with one at the end. The first one compiles the kernels
# for its server; meanwhile, the other processes run tests that need no kernels, since a second server would wait for them.
LONG_GROUPS = (
    "real",
    *(f"tests/verify/model/gpu/test_{name}.py" for name in ("ranks", "triton_sampling", "decoder", "graphs", "triton_experts")),
    *(f"tests/verify/sampling/test_{name}.py" for name in ("acceptance", "rejection")),
    "tests/verify/model/cpu/native/test_gguf.py",
    "tests/verify/model/gpu/test_triton_attention.py",
    "served",
    "real test_answers",
    "real test_equality",
    "lossless greedy",
    "lossless sampled",
    "guarded",
    "tests/integration/test_tokenizers.py",
    "tests/server/chat/tools/test_parser.py",
    "tests/bench/test_live.py",
    "tests/server/test_cli.py",
    "tests/integration/faults/test_shutdown.py",
    "tests/integration/api/test_agent_loops.py",
)


def group_of(item: pytest.Item) -> str:
    """The pytest-xdist group of a test: as marked, else the shared server that it needs, else its module."""
    marker = item.get_closest_marker("xdist_group")
    if marker is not None:
        return str(marker.args[0])
    fixtures = getattr(item, "fixturenames", ())
    return next((name for name in SHARED_SERVERS if name in fixtures), item.nodeid.split("::")[0])


@lru_cache
def prepare() -> None:
    """Imports PyTorch in a process that runs tests, but not in the one that hands them out, for which all others would wait."""
    gc.disable()  # imports and tests are millions of permanent objects; scanning them takes a tenth of the time
    import torch

    torch.set_num_threads(1)  # more threads do not speed up tiny models


def pytest_collectstart() -> None:
    prepare()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch"):  # around each test, pytest attaches its handlers to all that do not propagate
            logging.getLogger(name).propagate = True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps the tests of a group in one process: pytest-xdist reads this marker once all tests are collected."""
    item.add_marker(pytest.mark.xdist_group(group_of(item)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts the longest groups first."""
    items.sort(key=lambda item: LONG_GROUPS.index(group_of(item)) if group_of(item) in LONG_GROUPS else len(LONG_GROUPS))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """What runs tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_config() -> LlamaConfig:
    from transformers import LlamaConfig

    from outrider.verify.model.attention.interface import NAME

    return LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,  # large, so that a random model's choices are not near-ties
        attn_implementation=NAME,
    )


@pytest.fixture(scope="session")
def tiny_runner(tiny_config: LlamaConfig) -> TorchRunner:
    """A random Llama of two layers, float32: a real model that runs in a millisecond."""
    import torch
    from transformers import LlamaForCausalLM

    from outrider.verify.model.torch_runner import TorchRunner

    torch.manual_seed(0)
    return TorchRunner(LlamaForCausalLM(tiny_config))


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """The embedded model in float32 on one thread, where drafted answers equal plain decoding."""
    costs = str(tmp_path_factory.mktemp("costs"))
    return load_settings(None, {"model.dtype": "float32", "speculation.cost_folder": costs, "model.threads": "1"})


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """Returns what was printed in 80 columns; fails if a cell was truncated or a line is longer."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))

    def read() -> str:
        text = capsys.readouterr().out
        assert text
        assert "…" not in text
        assert max(len(line.rstrip()) for line in text.splitlines()) <= WIDTH, text
        return text

    return read
