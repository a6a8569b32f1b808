"""The run's arguments, the settings of each number of bits, and what is said about peers that are not installed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.peers.contenders import LlamaShape
from bench.peers.run import Choice, parse_bits, run, settings_by_bits
from bench.plan import BenchError


def test_bits_choose_data_type_and_quantisation(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("model: {dtype: float32, context_tokens: 512}")
    flags = ["--speculation.max_nodes", "8", "--model.threads", "3"]
    settings = settings_by_bits(file, flags, [16, 4])[4]
    assert (settings.model.dtype, settings.model.quantize, settings.model.threads) == ("bfloat16", "int4", 3)
    assert (settings.model.context_tokens, settings.speculation.max_nodes, settings.model.device) == (512, 8, "cpu")
    assert settings_by_bits(None, [], [32])[32].model.dtype == "float32"
    assert settings_by_bits(None, [], [32])[32].model.threads == os.cpu_count()


@pytest.mark.parametrize("flag", ["--model.dtype", "--model.quantize"])
def test_what_bits_choose_is_no_flag(flag: str) -> None:
    with pytest.raises(BenchError, match=f"leave out {flag}"):
        settings_by_bits(None, [flag, "int8"], [16])


@pytest.mark.parametrize("bits", ["5", "16,", "none"])
def test_unknown_bits_are_reported(bits: str) -> None:
    with pytest.raises(BenchError, match="--bits takes some of 32, 16, 8, 4"):
        parse_bits(bits)


def test_nothing_is_measured_if_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaShape, "packages", {"no_such_module": "some-package"})
    choice = Choice(["llama-7m"], [16], ["llama.cpp"], ["none"], None, 1, 1)
    with pytest.raises(BenchError, match="pip install some-package"):
        run(settings_by_bits(None, [], [16]), choice, None)


def test_a_shape_that_cannot_be_measured_is_reported() -> None:
    with pytest.raises(BenchError, match="There is no shape 'llama-9t'"):
        Choice(["llama-9t"], [16], [], [], None, 1, 1)
    with pytest.raises(BenchError, match=r"qwen3-0\.6b is no Llama"):
        Choice(["qwen3-0.6b"], [16], ["llama.cpp"], [], None, 1, 1)
    Choice(["qwen3-0.6b"], [16], ["outrider"], [], None, 1, 1)
