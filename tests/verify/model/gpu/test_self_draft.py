"""Self-speculation over pages, as on a GPU: drafts in the pages of the target's cache, with the answers of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import LlamaConfig

from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.pearl import PearlDrafter
from outrider.drafters.registry import Resources, make
from outrider.verify.decode import decode
from outrider.verify.generation import DecodeOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.self_draft.layers import LayerSkipper
from outrider.verify.self_draft.search import own_texts
from outrider.verify.self_draft.session import SelfRunner
from outrider.verify.verifier import TreeVerifier
from tests.verify.draft_model.test_draft_model import EAGER
from tests.verify.self_draft.targets import layered


@pytest.fixture
def target(tiny_config: LlamaConfig, monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    monkeypatch.setattr(ModelRunner, "in_pages", True)
    return layered(tiny_config, idle=(1, 2, 4, 5), compile="off")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["draft", "draft-tree", "pearl"])
def test_answers_equal_plain_decoding(target: ModelRunner, name: DrafterName) -> None:
    """Idle layers are skipped, so each draft is the target's choice. A draft model's thread would share the pool."""
    shared = SelfRunner(LayerSkipper(target).without((1, 2, 4, 5)))
    shared.runner.start(target.context_tokens)
    drafter = make(name, Resources(EAGER, model=shared.session))
    prompt, options = np.arange(3, 62, dtype=np.int32), DecodeOptions(SamplingParams(temperature=0), 7, max_nodes=12)
    found = decode(TreeVerifier(target, target.new_cache()), drafter, prompt, options)
    assert found.tokens == decode(TreeVerifier(target, target.new_cache()), NoDrafter(), prompt, options).tokens
    assert found.tokens_per_step > 2
    assert not isinstance(drafter, PearlDrafter) or drafter.rejections == 0


@pytest.mark.slow
def test_own_texts_lie_in_pages(target: ModelRunner) -> None:
    texts = own_texts(target, ([3, 4, 5], [60, 61]))
    shallow = LayerSkipper(target).without((1, 2, 4, 5))
    for text in texts:
        assert bool(text.agrees(shallow.forward_all([text.drafts])[0]).all())
