"""Models with recurrent layers in pages and kernels, as on a GPU: the logits of the plain forward, and lossless drafts."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from drafters.interface import Drafter
from drafters.none import NoDrafter
from drafters.registry import Resources, make
from tests.drafts import Oracle
from tests.verify.model.families import build
from tests.verify.model.gpu.conftest import DEVICE
from tests.verify.model.test_recurrent_models import TREE, read, text_of
from verify.decode import decode
from verify.errors import ModelError
from verify.generation import DecodeOptions
from verify.model.attention import NAME
from verify.model.batch import ForwardBatch
from verify.model.gpu.graphs import GraphedForward
from verify.model.recurrent import states
from verify.model.runner import ModelRunner
from verify.model.segment import Segment
from verify.model.self_check import check_model
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

CONTEXT = 300
FAMILIES = [
    "qwen3_5",
    "lfm2",
    *(pytest.param(each, marks=pytest.mark.slow) for each in ("granite_hybrid", "falcon_h1", "bamba")),
]


@functools.cache
def plain(family: str) -> ModelRunner:
    return ModelRunner(build(family, NAME).to(DEVICE), CONTEXT, started=False)


@functools.cache
def started(family: str) -> ModelRunner:
    runner = ModelRunner(build(family, NAME).to(DEVICE), CONTEXT, compile="off", started=False)
    runner.pages = 24
    runner.start(CONTEXT)
    return runner


@pytest.fixture(autouse=True)
def in_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ModelRunner, "in_pages", property(lambda self: self.context_tokens == CONTEXT and self is not None))
    yield


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_have_the_logits_of_the_plain_forward(family: str) -> None:
    """Trees and chains of two streams together, committed paths, and a step beside a long part of a prompt."""
    found = []
    for runner in (started(family), plain(family)):
        pass
