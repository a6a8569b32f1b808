"""Both programs emit recorded answers of random weights, in fewer steps with drafts."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bench.peers.contenders import PEERS, RandomWeights
from bench.peers.run import replay, settings_by_bits, time_steps, write_files
from bench.recordings import Line
from outrider.drafters.registry import Resources
from tests.bench.peers.test_llama_model import MISSING

PROMPT = np.array([*range(600), 5, 6, 7, 8, 9, 10, 5], np.int32)  # more than llama.cpp reads at once
LINE = Line(PROMPT, np.array([6, 7, 8, 9, 10, 5] * 4, np.int32))
FLAGS = ["--speculation.max_nodes", "8", "--model.threads", "1", "--model.context_tokens", "1024"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [16, 8, 4])
@pytest.mark.parametrize("names", [["outrider"], ["outrider", "llama.cpp"]], ids=len)
def test_all_programs_emit_the_record_in_fewer_steps_with_drafts(tmp_path: Path, bits: int, names: list[str]) -> None:
    if "llama.cpp" in names:
        pytest.importorskip("llama_cpp", reason=MISSING)
    settings = settings_by_bits(None, FLAGS, [bits])[bits]
    file = write_files("llama-7m", [bits], tmp_path)[bits] if "llama.cpp" in names else None
    weights = RandomWeights("llama-7m", settings, file, Resources(vocabulary=4097), ["none", "fusion"])
    with ExitStack() as stack:
        peers = [PEERS[name](weights, stack) for name in names]
        rows = time_steps(peers, lambda: None)
        assert [row["peer"] for row in rows] == names
        assert all(row["rows_16_ms"] > 0 for row in rows)
        for peer in peers:
            plain, drafted = (peer.answer(method, LINE) for method in peer.methods)
            assert plain.ids == drafted.ids == LINE.answer.tolist()
            assert plain.steps == len(LINE.answer)
            assert drafted.steps is not None and drafted.steps < len(LINE.answer) / 2
        figures = replay(peers, [LINE], 1)
    assert [row["peer"] for row in figures] == [name for name in names for _ in range(2)]
    assert figures[1]["tokens_per_step"] > 2 and figures[1]["same_as_plain"] == "1/1"
