"""Merges are recorded with their contexts, and the divergence is that of the model's distributions."""

from __future__ import annotations

import numpy as np
import pytest

from bench.ablations.merging import Merge, RecordingGraphs, divergence, logarithms
from outrider.drafters.options import DraftGraphOptions
from outrider.verify.model.torch_runner import TorchRunner
from tests.drafts import Driven
from tests.language import ToyModel


def test_the_texts_of_a_merge_have_the_same_ending() -> None:
    merges: list[Merge] = []
    table = np.full((4, 4), 0.25)
    options = DraftGraphOptions(children=2, steps=3, theta_prob=0.1, theta_sib=0.1, only_if_worth=False, tau=1)
    drafter = Driven(RecordingGraphs(ToyModel(table), options, merges))
    drafter.begin(np.array([3, 2], np.int32))
    drafter.propose(64)
    assert merges
    for own, merged in merges:
        assert own != merged
        assert own[:2] == merged[:2] == [3, 2]
        assert own[-1] == merged[-1]


def test_the_divergence_of_equal_texts_is_none(tiny_runner: TorchRunner) -> None:
    first, second = [5, 17, 42], [8, 9, 42]
    assert divergence(tiny_runner, [(first, first)]) == 0.0
    own, merged = (logarithms(tiny_runner, text).numpy() for text in (first, second))
    expected = float(np.sum(np.exp(own) * (own - merged)))
    assert expected > 0
    assert divergence(tiny_runner, [(first, second), (first, first)]) == pytest.approx(expected / 2)
