"""A replaying worker emits the recorded answer."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafters.none import NoDrafter
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load_target
from outrider.verify.decode import decode
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier
from tests.agents.script import FINAL_TEXT
from tests.agents.worker import replay


def test_the_recorded_answer_replaces_the_models(monkeypatch: pytest.MonkeyPatch, exact: Settings) -> None:
    runner, tokenizer = load_target(exact), load_tokenizer(exact.model.path)
    runner.start(256)
    monkeypatch.setattr(Verifier, "begin", Verifier.begin)  # undone after the test
    replay(tokenizer)
    prompt = np.array(tokenizer.encode("def main():", add_special_tokens=False), np.int32)
    options = DecodeOptions(SamplingParams(temperature=0.8), 64, stop_ids=frozenset([int(tokenizer.eos_token_id)]))
    decoded = decode(Verifier(runner, runner.new_cache()), NoDrafter(), prompt, options)
    assert tokenizer.decode(decoded.tokens, skip_special_tokens=True) == FINAL_TEXT
