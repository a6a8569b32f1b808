"""The peers that can run, and their options of `generate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bench.model.peers import Transformers
from outrider import models


class FakeModel:
    """Appends token 7 until `max_new_tokens`, and keeps the options."""

    generation_config = SimpleNamespace(eos_token_id=2)

    def generate(self, ids: torch.Tensor, **options: Any) -> torch.Tensor:
        self.options = options
        return torch.cat([ids, torch.full((1, options["max_new_tokens"]), 7)], 1)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were loaded."""
    paths: list[str] = []

    def load(self: Transformers, path: str) -> FakeModel:
        paths.append(path)
        return FakeModel()

    monkeypatch.setattr(Transformers, "_load", load)
    monkeypatch.setattr("bench.model.peers.load_tokenizer", lambda path: SimpleNamespace(eos_token_id=3))
    return paths


def peers(path: str, draft: str | None = None) -> Transformers:
    return Transformers(path, torch.float32, torch.device("cpu"), draft)


def test_the_embedded_model_has_an_assistant(loads: list[str]) -> None:
    assert peers(str(models.TARGET)).names == ["transformers", "transformers-lookup", "transformers-assistant"]
    assert loads == [str(models.TARGET), str(models.DRAFT)]


def test_another_model_needs_a_given_assistant(loads: list[str]) -> None:
    other = "/models/other"
    assert peers(other).names == ["transformers", "transformers-lookup"]
    assert "transformers-assistant" in peers(other, "/models/small").names


def test_options_of_generate(loads: list[str]) -> None:
    peer = peers(str(models.TARGET))
    tokens, seconds = peer.answer("transformers-lookup", np.array([1, 2], np.int32), 0.5, 3, seed=1)
    assert tokens == [7, 7, 7]
    assert seconds > 0
    options = peer._model.options
    assert (options["do_sample"], options["temperature"], options["eos_token_id"]) == (True, 0.5, [2, 3])
    assert "prompt_lookup_num_tokens" in options
    peer.answer("transformers", np.array([1], np.int32), 0.0, 3, seed=1)
    assert not peer._model.options["do_sample"]
