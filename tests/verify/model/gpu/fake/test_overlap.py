"""The worker over a GPU with a clock: what the host does for one half of the requests overlaps the other half's forward."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from outrider.verify.budget import Draft
from outrider.verify.stream import Stream
from tests.server.worker.fakes import Rig, request
from tests.verify.model.gpu.fake.emulated_cuda import CUDA, emulated_cuda
from tests.verify.model.gpu.fake.test_step import runner_on

FORWARD_SECONDS = 1.0
STREAMS = 2


def seconds_per_round(config: LlamaConfig, host_seconds: float, overlaps: bool) -> float:
    """Seconds in which each of STREAMS requests gets a token, if the host works for `host_seconds` in that time."""
    draft = Stream.draft

    def slow_draft(stream: Stream) -> Draft:
        clock.work(host_seconds / STREAMS)
        return draft(stream)

    with emulated_cuda(FORWARD_SECONDS) as clock, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "draft", slow_draft)
        rig = Rig(runner_on(CUDA, config), {"scheduling.max_active": STREAMS}, overlaps)
        rig.worker._runtime.max_active = STREAMS
        rig.send(*(request(id, max_tokens=40) for id in "ab"))
        rig.step(6)  # prompts, and the first times
        before, started = len(rig.order), clock.now
        rig.step(24)
        seconds, tokens = clock.now - started, len(rig.order) - before
        assert len(set(rig.order)) == STREAMS
        rig.close()
    return seconds * STREAMS / tokens


@pytest.mark.slow
@pytest.mark.parametrize(("host_seconds", "alone", "overlapped"), [(1.5, 2.5, 2.0), (3.0, 4.0, 3.0)])
def test_halves_take_as_long_as_the_slower_of_host_and_device(
    tiny_config: LlamaConfig, host_seconds: float, alone: float, overlapped: float
) -> None:
    """Two forwards of a half each, or the host's work for both, whichever is longer."""
    assert seconds_per_round(tiny_config, host_seconds, overlaps=False) == pytest.approx(alone, rel=0.01)
    assert seconds_per_round(tiny_config, host_seconds, overlaps=True) <= overlapped * 1.05
