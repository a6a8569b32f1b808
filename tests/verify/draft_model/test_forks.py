"""A fork's draft model has the rows of the shared text, and caches go to the sessions that live."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.drafters.none import NoDrafter
from outrider.drafters.options import NEED_A_MODEL, DrafterName
from outrider.drafters.registry import Resources, clone, make
from outrider.verify.decode import decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.verify.draft_model.test_draft_model import EAGER, PROMPT, close_relative, count_rows


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", NEED_A_MODEL)
def test_a_fork_reads_only_new_tokens(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, name: DrafterName, slots: int
) -> None:
    """Both go on as if the other were not there. With one cache for both, the fork reads its text."""
    shared = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary, slots)
    resources, options = Resources(EAGER, model=shared.session), DecodeOptions(SamplingParams(temperature=0), 12)
    verifier, drafter = Verifier(tiny_runner, tiny_runner.new_cache()), make(name, resources)
    text = np.concatenate([PROMPT, decode(verifier, drafter, PROMPT, options).tokens]).astype(np.int32)
    forked = verifier.clone(tiny_runner.new_cache(), 15)
    copied = clone(drafter, verifier.sequence, forked.sequence)
    rows = count_rows(monkeypatch, shared.runner)
    edited = np.concatenate([PROMPT[:15], [60, 61]]).astype(np.int32)
    expected = decode(Verifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), edited, options).tokens
    assert decode(forked, copied, edited, options).tokens == expected
    assert rows[0] == (2 if slots == 2 else len(edited))
    rows.clear()
    decode(verifier, drafter, np.append(text, [7]).astype(np.int32), options)
    if slots == 2:
        assert rows[0] < 8
