"""A quantised checkpoint loads if its package is installed, and drafting is lossless."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import models
from outrider.drafters.registry import Resources, make
from outrider.verify.decode import decode
from outrider.verify.model.backend import load_model
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier

PROMPT = np.arange(5, 40, dtype=np.int32)


@pytest.mark.filterwarnings("ignore")
def test_eight_bit_weights_of_torchao(tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(models.TARGET, dtype=torch.float32, quantization_config=config)
    model.save_pretrained(tmp_path)
    runner = load_model(LoadOptions(str(tmp_path), dtype="float32"))
    assert isinstance(runner, TorchRunner)
    assert any("Int8" in type(parameter).__name__ for parameter in runner.model.parameters())
    for temperature in (0.0, 1.0):
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=2), max_tokens=40)
        plain = decode(Verifier(runner, runner.new_cache()), make("none", Resources()), PROMPT, options)
        drafter = make("fusion", Resources(vocabulary=runner.vocabulary + 1))
        drafted = decode(Verifier(runner, runner.new_cache()), drafter, PROMPT, options)
        assert drafted.tokens == plain.tokens
        assert len(drafted.steps) < len(plain.steps)
