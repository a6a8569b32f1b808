"""A step on an emulated GPU: the host waits once, for the choices, and emits what it emits on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from outrider.drafters.interface import EMPTY, DraftTree
from outrider.drafters.model.language_model import Candidates
from outrider.drafters.registry import Resources, make
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.heads.draft import HeadRunner
from outrider.verify.heads.loading import layer_config
from outrider.verify.heads.model import HeadModel
from outrider.verify.heads.networks import EagleHead
from outrider.verify.model.attention.interface import NAME
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.round import run_round
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Step, Stream
from outrider.verify.verifier import Verifier
from tests.verify.model.families import random_model
from tests.verify.model.gpu.fake.emulated_cuda import CUDA, Clock, emulated_cuda

CONTEXT = 128
PROMPT = np.arange(5, 40, dtype=np.int32)
TREE = DraftTree(
    np.array([7, 9, 11, 7], np.int32),
    np.array([-1, 0, 0, -1], np.int32),
    np.array([1, 2, 2, 1], np.int32),
    np.ones(4, np.float32),
    np.zeros(4, np.uint8),
)
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=1.0, seed=3),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    "filters": SamplingParams(temperature=1.0, seed=3, top_k=20, top_p=0.9, min_p=0.01),
}


def runner_on(device: torch.device, config: LlamaConfig) -> TorchRunner:
    """A tiny model of random weights, the same on each device."""
    torch.manual_seed(1)
    runner = TorchRunner(random_model(config, NAME).to(device), CONTEXT, compile="off", started=False)
    runner.pages = 16
    runner.start(CONTEXT)
    return runner


def steps(runner: TorchRunner, params: SamplingParams, clock: Clock | None = None) -> list[Any]:
    """The tokens of some steps with masks of a grammar. On a GPU, checks that the host waits once in each."""
    verifier = Verifier(runner, runner.new_cache())
    verifier.begin(PROMPT, params, max_tokens=40, stop_ids=[2])
    verifier.prefill()
    allowed = np.ones((len(TREE) + 1, runner.vocabulary), np.bool_)
    allowed[:, 50:] = False
    found = []
    for mask in (None, allowed, None):
        if clock is not None:
            clock.waits.clear()
        verdict = verifier.verify(TREE, feedback=4, allowed=mask)
        verifier.commit(verdict)
        if clock is not None:
            assert clock.waits == ["event"]
        found.append((verdict.tokens.tolist(), verdict.topk_ids.tolist()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
def test_a_step_waits_once(tiny_config: LlamaConfig, name: str) -> None:
    """Not in uploads, masks, filters or the commit of rows that are out of place."""
    expected = steps(runner_on(torch.device("cpu"), tiny_config), PARAMS[name])
    with emulated_cuda() as clock:
        assert steps(runner_on(CUDA, tiny_config), PARAMS[name], clock) == expected


def rounds(runner: TorchRunner, clock: Clock | None = None) -> list[list[int]]:
    """The answers of streams that are computed together. On a GPU, checks that the host waits once in each round of steps."""
    params = [*PARAMS.values()]
    streams = [
        Stream(
            Verifier(runner, runner.new_cache()),
            make("lookup", Resources()),
            PROMPT + number,
            DecodeOptions(each, 12, max_nodes=4),
        )
        for number, each in enumerate(params)
    ]
    answers: list[list[int]] = [[] for _ in streams]
    while any(stream.remaining for stream in streams):
        reads = any(stream.unread_prompt for stream in streams)
        if clock is not None:
            clock.waits.clear()
        for answer, outcome in zip(answers, run_round(streams), strict=True):
            assert isinstance(outcome, Step)
            answer += outcome.tokens
        assert clock is None or reads or clock.waits == ["event"]
    return answers


@pytest.mark.slow
def test_a_round_of_several_streams_waits_once(tiny_config: LlamaConfig) -> None:
    expected = rounds(runner_on(torch.device("cpu"), tiny_config))
    assert all(len(answer) == 12 for answer in expected)
    with emulated_cuda() as clock:
        assert rounds(runner_on(CUDA, tiny_config), clock) == expected


def levels(target: TorchRunner, shared: DraftRunner, params: SamplingParams, clock: Clock | None = None) -> list[Any]:
    """The candidates of a draft's levels in two steps. On a GPU, checks that the host waits once for each after the prompt."""
    verifier, session = Verifier(target, target.new_cache()), shared.session()
    verifier.begin(PROMPT, params, max_tokens=40)
    verifier.prefill()
    session.begin(verifier.sequence, params)
    found: list[Any] = []

    def waits_once(candidates: Candidates) -> Candidates:
        found.append(candidates.tokens.tolist())
        if clock is not None and len(found) > 1:
            assert clock.waits == ["event"]
        if clock is not None:
            clock.waits.clear()
        return candidates

    if clock is not None:
        clock.waits.clear()
    for _ in range(2):
        root = waits_once(session.root(3)).tokens
        waits_once(session.expand(root[0, :2].tolist(), [0, 0], 3))
        verdict = verifier.verify(EMPTY)
        verifier.commit(verdict)
        session.advance(verdict.tokens)
        if clock is not None:
            clock.waits.clear()
    return found


def shared_draft(target: TorchRunner, kind: str, config: LlamaConfig) -> DraftRunner:
    """A draft model that is the target, or a head for it."""
    if kind == "model":
        return DraftRunner(target, target.vocabulary)
    torch.manual_seed(2)
    head = HeadModel(EagleHead(layer_config(config.to_dict(), {})), target, pack=False)
    head.pages, target._pool = 16, None
    target.start(CONTEXT)  # again, with room for hidden states
    head.start(CONTEXT)
    return HeadRunner(head)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["model", "head"])
@pytest.mark.parametrize("name", ["greedy", "temperature"])
def test_a_level_of_a_draft_waits_once(tiny_config: LlamaConfig, name: str, kind: str) -> None:
    target = runner_on(torch.device("cpu"), tiny_config)
    expected = levels(target, shared_draft(target, kind, tiny_config), PARAMS[name])
    with emulated_cuda() as clock:
        target = runner_on(CUDA, tiny_config)
        assert levels(target, shared_draft(target, kind, tiny_config), PARAMS[name], clock) == expected
