"""A draft model reads a prompt while the target does, until it is used otherwise."""

from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest

from outrider.drafters.interface import Ints
from outrider.drafters.sequence import Sequence
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.model.torch_runner import TorchRunner
from tests.verify.draft_model.test_draft_model import close_relative


def test_a_prompt_is_read_ahead_and_any_use_of_the_model_ends_that(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verify.draft_model.session.READ_AHEAD_TOKENS", 8)
    monkeypatch.setattr("outrider.verify.draft_model.session.UNREAD_TOKENS", 4)
    draft = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary)
    prompt = (np.arange(60) % 90).astype(np.int32)

    def read(idle: bool) -> tuple[int, Ints]:
        text, session = Sequence(), draft.session()
        text.begin(prompt)
        session.begin(text)
        if idle and session._reading is not None:
            wait([session._reading])
        return draft.cache_for(session).length, session.root(5).tokens

    length, candidates = read(idle=True)
    assert length == 56
    assert np.array_equal(read(idle=False)[1], candidates)
