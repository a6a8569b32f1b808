"""Requests that do not fit the page pool together wait for each other, and get the answers that they get alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.verify import controller
from outrider.verify import stream as streams
from outrider.verify.model.torch_runner import TorchRunner
from tests.server.worker.fakes import Rig, request
from tests.verify.model.gpu.conftest import DEVICE, PAGE

PROMPTS = {"a": 70, "b": 33, "c": 66}  # tokens


def rig(config: LlamaConfig, pages: int, **settings: Any) -> Rig:
    torch.manual_seed(1)
    runner = TorchRunner(LlamaForCausalLM(config).to(DEVICE), 3 * PAGE, compile="off", started=False)
    runner.pages = pages
    runner.start(3 * PAGE)
    made = Rig(runner, **settings)
    made.worker._runtime.max_active = 3
    return made


def run(made: Rig) -> dict[str, list[int]]:
    """The answers of all requests, which come together."""
    made.send(*(request(id, prompt=[length - 30] * length, max_tokens=3, session=id) for id, length in PROMPTS.items()))
    made.step(30)
    return {id: made.tokens(id) for id in PROMPTS}


@pytest.mark.slow
def test_requests_that_do_not_fit_together_wait(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    for module in (streams, controller):
        monkeypatch.setattr(module, "PREFILL_CHUNK_TOKENS", PAGE)
    monkeypatch.setattr(streams, "MAX_NODES", 0)
    roomy, tight = rig(tiny_config, 12), rig(tiny_config, 4)
    expected = run(roomy)
    assert all(len(tokens) == 3 for tokens in expected.values())
    assert run(tight) == expected
    assert tight.worker.scheduler.is_idle
    swapped = [session.verifier.is_swapped_out for session in tight.worker.sessions._sessions.values()]
    assert len(swapped) == 3 and any(swapped)  # the sessions that are not in use made room
    for made in (roomy, tight):
        made.close()
