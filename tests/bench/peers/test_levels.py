"""The settings of each number of bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.peers.levels import Levels
from bench.plan import BenchError


def test_bits_choose_data_type_and_quantisation(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: {dtype: float32, context_tokens: 512}")
    levels = Levels(file, ["--speculation.max_nodes", "8"], threads=3)
    settings = levels.settings(4)
    assert (settings.model.dtype, settings.model.quantize, settings.model.threads) == ("bfloat16", "int4", 3)
    assert (settings.model.context_tokens, settings.speculation.max_nodes, settings.model.device) == (512, 8, "cpu")
    assert levels.server_flags(16)[:2] == ["--config", str(file)]
    assert Levels(None, [], 1).settings(32).model.dtype == "float32"


@pytest.mark.parametrize("flag", ["--model.dtype", "--model.quantize"])
def test_what_bits_choose_is_no_flag(flag: str) -> None:
    with pytest.raises(BenchError, match=f"leave out {flag}"):
        Levels(None, [flag, "int8"], 1)
