"""Draft heads beside quantised weights, restored sessions and other streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from outrider import models
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.verify.decode import decode
from outrider.verify.heads.draft import HeadRunner
from outrider.verify.heads.loading import load_head
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.load_options import LoadOptions, Quantization
from outrider.verify.model.runner import ModelRunner
from outrider.verify.round import run_round
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier
from tests.verify.draft_model.test_draft_model import EAGER

pytestmark = pytest.mark.slow
PROMPTS = ("class Stack:\n    def __init__(self):\n", "def read_items(items):\n", "import os\n\n\nclass Merger:\n    def ")
DRAFTERS: tuple[DrafterName, ...] = ("draft-tree", "pearl", "fusion")


def load(quantize: Literal["none", "int8", "int4"]) -> tuple[ModelRunner, HeadRunner]:
    """The embedded target with its head."""
    options = LoadOptions(str(models.TARGET), dtype="float32", device="cpu", quantization=Quantization(quantize))
    target = load_weights(options)
    head = load_head(str(models.HEAD), target)
    assert head is not None
    target.start(512)
    return target, HeadRunner(head)


@pytest.fixture(scope="module", params=["none", "int8", "int4"])
def pair(request: pytest.FixtureRequest) -> tuple[ModelRunner, HeadRunner]:
    return load(request.param)


def encoded(number: int) -> np.ndarray:
    return np.array(load_tokenizer(str(models.TARGET)).encode(PROMPTS[number]), np.int32)


def options(number: int, temperature: float = 0.8) -> DecodeOptions:
    return DecodeOptions(SamplingParams(temperature=temperature, seed=number), 32, max_nodes=16)


def plain(target: ModelRunner, prompt: np.ndarray, wanted: DecodeOptions) -> list[int]:
    return decode(Verifier(target, target.new_cache()), NoDrafter(), prompt, wanted).tokens


def resources(model: Callable[[], LanguageModel]) -> Resources:
    return Resources(EAGER, model=model)


def test_streams_get_the_answers_of_each_alone(pair: tuple[ModelRunner, HeadRunner]) -> None:
    target, shared = pair
    expected = [plain(target, encoded(number), options(number)) for number in range(len(PROMPTS))]
    active = {
        number: Stream(
            Verifier(target, target.new_cache()), make(name, resources(shared.session)), encoded(number), options(number)
        )
        for number, name in enumerate(DRAFTERS)
    }
    found: list[list[int]] = [[] for _ in PROMPTS]
    rounds = 0
    while active:
        rounds += 1
        outcomes = run_round(list(active.values()), run_drafts=shared.run_drafts)
        for number, outcome in zip(list(active), outcomes, strict=True):
            assert outcome is not None and not isinstance(outcome, Exception), outcome
            found[number] += outcome.tokens
            if outcome.finish:
                active.pop(number).close()
    assert found == expected
    assert rounds < 36


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_restored_session_goes_on(pair: tuple[ModelRunner, HeadRunner], name: DrafterName) -> None:
    """As after a restart: the drafter is new, and the text's rows come from host memory."""
    target, shared = pair
    verifier = Verifier(target, target.new_cache())
    first = decode(verifier, make(name, resources(shared.session)), encoded(0), options(0, 0.0)).tokens
    text, length = verifier.sequence.tokens.copy(), verifier.sequence.prompt_length
    verifier.swap_out()
    restored = Verifier.restored(target, text, length, verifier.rows)
    restored.swap_in(target.new_cache())
    drafter = make(name, resources(shared.session))
    drafter.begin(restored.sequence)
    drafter.end()
    prompt = np.concatenate([encoded(0), first, encoded(1)]).astype(np.int32)
    found = decode(restored, drafter, prompt, options(1, 0.0))
    assert found.tokens == plain(target, prompt, options(1, 0.0))
    assert name == "pearl" or found.tokens_per_step > 1.3
