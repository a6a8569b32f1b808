"""Recorded answers of random shapes: how they are cut, and, with llama-cpp-python, that llama.cpp emits them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bench.peers.levels import Levels
from bench.peers.shapes import PEERS, RandomWeights, Shapes, fit, time_steps, write_files
from bench.plan import BenchError
from bench.recordings import Line
from outrider.drafters.registry import Resources
from tests.bench.peers.test_llama import MISSING

LINE = Line(np.array([5, 6, 7, 8, 9, 10, 5], np.int32), np.array([6, 7, 8, 9, 10, 5] * 4, np.int32))
LONG = Line(np.array([*range(600), 5, 6, 7, 8, 9, 10, 5], np.int32), LINE.answer)  # more than llama.cpp reads at once


def test_a_prompt_keeps_the_end_that_fits() -> None:
    assert fit(LINE, 28).prompt.tolist() == [9, 10, 5]
    assert fit(LINE, 4096).prompt.tolist() == LINE.prompt.tolist()


def test_a_shape_that_cannot_be_measured_is_reported() -> None:
    with pytest.raises(BenchError, match="There is no shape 'llama-9t'"):
        Shapes(["llama-9t"], [16], [], [], None, 1, 1)
    with pytest.raises(BenchError, match=r"qwen3-0\.6b is no Llama"):
        Shapes(["qwen3-0.6b"], [16], ["llama.cpp"], [], None, 1, 1)
    Shapes(["qwen3-0.6b"], [16], ["outrider"], [], None, 1, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_all_programs_emit_the_record_in_fewer_steps_with_drafts(tmp_path: Path, bits: int) -> None:
    pytest.importorskip("llama_cpp", reason=MISSING)
    settings = Levels(None, ["--speculation.max_nodes", "8"], 1).settings(bits)
    file = write_files("llama-7m", [bits], tmp_path)[bits]
    weights = RandomWeights("llama-7m", settings, 1, 1024, file, Resources(vocabulary=4097), ["none", "fusion"])
    with ExitStack() as stack:
        peers = [peer(weights, stack) for peer in PEERS.values()]
        rows = time_steps(peers, lambda: None)
        assert [row["peer"] for row in rows] == list(PEERS)
        assert all(row["rows_16_ms"] > 0 for row in rows)
        for peer in peers:
            plain, drafted = (peer.replay(method, LONG) for method in peer.methods)
            assert plain.ids == drafted.ids == LINE.answer.tolist()
            assert plain.steps == len(LINE.answer)
            assert drafted.steps is not None and drafted.steps < len(LINE.answer) / 2
