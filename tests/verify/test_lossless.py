"""Lossless decoding: on trained models in float32, every drafter gives the tokens of plain decoding, greedy and sampled."""

import functools
from collections.abc import Iterable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from outrider import models
from outrider.drafters.interface import Drafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import NAMES, DrafterName, DraftTime, FusionOptions
from outrider.drafters.registry import Resources, make
from outrider.drafters.tables import base_table
from outrider.drafters.tables.suffix import Corpus, index
from outrider.verify.decode import Decoded
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.model.backend import load_model
from outrider.verify.model.load_options import LoadOptions, Quantize
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from tests.decoding import answer_of
from tests.drafts import EAGER
from tests.slow import mostly_slow

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
FORMATS: dict[str, Quantize] = {"float32": "none", "int8": "int8", "int4": "int4"}
ANSWER_TOKENS = 32
ERROR_INTERVAL = 7  # every 7th token of a prediction is wrong


class Subject:
    """The embedded model, its prompts and its plain answers."""

    def __init__(self, quantize: Quantize) -> None:
        self.tokenizer = tokenizer = load_tokenizer(str(models.TARGET))
        self.runner = load_model(LoadOptions(str(models.TARGET), dtype="float32", device="cpu", quantize=quantize))
        self.prompts = [np.array(tokenizer.encode(text), np.int32) for text in CODE]
        self.stop_ids = stop_ids(self.runner.stop_tokens, tokenizer)
        draft = load_model(LoadOptions(str(models.DRAFT), dtype="float32", device="cpu"))
        base, model = base_table.load(models.BASE_TABLE), DraftRunner(draft, self.runner.vocabulary).session
        self.resources = Resources(base=base, vocabulary=len(tokenizer) + 1, model=model)
        self._plain: dict[tuple[int, float], list[int]] = {}

    def options(self, number: int, temperature: float) -> DecodeOptions:
        return DecodeOptions(SamplingParams(temperature, seed=number), ANSWER_TOKENS, self.stop_ids)

    def decode(self, drafter: Drafter, number: int, options: DecodeOptions) -> Decoded:
        return answer_of(self.runner, self.prompts[number], options, drafter)

    def plain(self, number: int, temperature: float) -> list[int]:
        """The answer to prompt `number` without drafts; decoded once."""
        if (number, temperature) not in self._plain:
            answer = self.decode(NoDrafter(), number, self.options(number, temperature))
            self._plain[number, temperature] = answer.tokens
        return self._plain[number, temperature]

    def corpus(self, numbers: Iterable[int], temperature: float) -> Corpus:
        """An index of prompts and their plain answers, for `retrieval`."""
        separator = self.resources.vocabulary - 1
        texts = ([separator, *self.prompts[number], *self.plain(number, temperature)] for number in numbers)
        return index(np.array([token for text in texts for token in text], np.int64), separator)


@functools.cache
def subject_of(form: str) -> Subject:
    return Subject(FORMATS[form])


# The two temperatures run in different processes; each decodes its plain answers once. Greedy decoding is a soak test.
TEMPERATURES = pytest.mark.parametrize(
    "temperature",
    [
        pytest.param(0.0, marks=[pytest.mark.xdist_group("lossless greedy"), pytest.mark.slow]),
        pytest.param(1.0, marks=pytest.mark.xdist_group("lossless sampled")),
    ],
)
# The other drafters share most of their code with `fusion`.
CASES = mostly_slow(product(FORMATS, [name for name in NAMES if name != "none"]), ("float32", "fusion"))


@TEMPERATURES
@pytest.mark.parametrize(("form", "drafter"), CASES)
def test_every_drafter_is_lossless(form: str, drafter: DrafterName, temperature: float) -> None:
    """`prediction` gets a partly wrong prediction, and `retrieval` a corpus: without them they draft nothing.

    Drafters with a model answer every second prompt whether or not it pays.
    """
    subject, numbers = subject_of(form), range(0, 40, 2)
    corpus = (subject.corpus(numbers, temperature),) if drafter == "retrieval" else ()
    resources = replace(subject.resources, corpus=corpus)
    tokens = steps = 0
    for number in numbers:
        times: list[DraftTime] = ["before", "during", "auto"]
        eager = replace(resources, options=replace(EAGER, fusion=FusionOptions(draft=times[number % 3])))
        expected = subject.plain(number, temperature)
        options = subject.options(number, temperature)
        if drafter == "prediction":
            wrong = [max(0, token - ((index + 1) % ERROR_INTERVAL == 0)) for index, token in enumerate(expected)]
            options = replace(options, prediction=tuple(wrong))
        decoded = subject.decode(make(drafter, eager if number % 4 > 1 else resources), number, options)
        assert decoded.tokens == expected, number
        tokens, steps = tokens + len(expected), steps + len(decoded.steps)
    assert steps < tokens  # some drafts were accepted
