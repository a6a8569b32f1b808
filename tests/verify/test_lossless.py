"""The promise: on trained models, drafted decoding gives plain decoding's tokens, greedy and sampled, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import models
from drafters.interface import Drafter, Ints
from drafters.model.language_model import LanguageModel
from drafters.none import NoDrafter
from drafters.options import DrafterName
from drafters.registry import Resources, make
from drafters.tables import ngram
from server.worker.detokenizer import AnswerText
from verify.decode import DecodeOptions, Generation, decode
from verify.draft_model import DraftRunner
from verify.model.loading import LoadOptions, load_model, stop_ids
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.tokenizer import fingerprint, load_tokenizer
from verify.verifier import TreeVerifier

VERBS = ("read", "write", "sort", "find", "merge", "count", "parse", "remove", "open", "close")
CODE = [
    template.format(verb=verb)
    for verb in VERBS
    for template in (
        "def {verb}_items(items):\n",
        "import os\n\n\nclass {verb}er:\n    def ",
        '    """{verb} the',
        "<|user|>\nWrite a function to {verb} a file.<|end|>\n<|assistant|>\n",
    )
]
TALES = [
    f"{start} {who}"
    for start in ("Once upon a time there was", "One day,", "The", "In a big house lived")
    for who in ("a cat", "Lily", "a dog and", "Tom", "the sun", "two friends", "a boy", "a bird", "Mom", "a tree")
]
assert len(CODE) == len(TALES) == 40


class Subject:
    """A model with its prompts."""

    def __init__(self, path: Path, texts: list[str]) -> None:
        self.tokenizer = tokenizer = load_tokenizer(str(path))
        self.runner: ModelRunner = load_model(LoadOptions(str(path), dtype="float32", device="cpu"))
        self.prompts = [np.array(tokenizer.encode(text), np.int32) for text in texts]
        self.stop_ids = stop_ids(self.runner.model, tokenizer)
        mine = fingerprint(tokenizer) == fingerprint(load_tokenizer(str(models.TARGET)))
        self.resources = Resources(
            base=ngram.load(models.BASE_TABLE) if mine else ngram.empty_base(),
            vocabulary=len(tokenizer) + 1,
            model=draft_of(self.runner) if mine else None,
        )


def draft_of(target: ModelRunner) -> Callable[[], LanguageModel]:
    """The embedded draft model, for one session after the other."""
    runner = load_model(LoadOptions(str(models.DRAFT), dtype="float32", device="cpu"))
    return DraftRunner(runner, target.vocabulary).session


@pytest.fixture(scope="module", params=["embedded", "stories260k"])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "embedded":
        return Subject(models.TARGET, CODE)
    return Subject(request.getfixturevalue("stories"), TALES)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_drafter_is_lossless(subject: Subject, temperature: float) -> None:
    drafted: list[DrafterName] = [name for name in subject.resources.names if name != "none"]
    for number, prompt in enumerate(subject.prompts):
        options = DecodeOptions(SamplingParams(temperature, seed=number), 32, subject.stop_ids)

        def answer(drafter: Drafter, prompt: Ints = prompt, options: DecodeOptions = options) -> list[int]:
            return decode(TreeVerifier(subject.runner, subject.runner.new_cache()), drafter, prompt, options).tokens

        expected = answer(NoDrafter())
        for name in drafted:
            assert answer(make(name, subject.resources)) == expected, (name, number)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_cut_the_same_text(subject: Subject, temperature: float) -> None:
    """A stop string inside an accepted block gives the text, and the count of tokens, of plain decoding."""
    stops = [" the", ")", "e "]

    def answer(name: DrafterName, prompt: Ints, seed: int) -> tuple[str, int]:
        verifier = TreeVerifier(subject.runner, subject.runner.new_cache())
        options = DecodeOptions(SamplingParams(temperature, seed=seed), 32, subject.stop_ids)
        generation = Generation(verifier, make(name, subject.resources), prompt, options)
        text, pieces, used = AnswerText(subject.tokenizer, stops), "", 0
        while True:
            step = generation.step()
            piece, count = text.feed(step.tokens)
            pieces, used = pieces + piece, used + count
            if text.stopped or step.finish:
                return pieces if text.stopped else pieces + text.finish(), used

    for number, prompt in enumerate(subject.prompts[:20]):
        assert answer("fusion", prompt, number) == answer("none", prompt, number)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_up_to_the_end_of_the_context(subject: Subject, temperature: float) -> None:
    runner = ModelRunner(subject.runner.model, 96)
    options = DecodeOptions(SamplingParams(temperature, seed=1), 10_000)
    prompt = subject.prompts[0]
    expected = decode(TreeVerifier(runner, runner.new_cache()), NoDrafter(), prompt, options)
    assert len(prompt) + len(expected.tokens) == 96
    assert expected.finish == "length"
    for name in subject.resources.names:
        drafted = decode(TreeVerifier(runner, runner.new_cache()), make(name, subject.resources), prompt, options)
        assert drafted.tokens == expected.tokens
