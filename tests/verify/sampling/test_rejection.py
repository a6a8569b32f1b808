"""`rejection`: answers successors the target's own distribution, shown by chi-square over a toy model's sequences."""

from collections.abc import Callable

import numpy as np
import pytest

from outrider.drafters.interface import Drafter, Verdict
from outrider.drafters.model.chain import ModelChain
from outrider.drafters.model.draft_tree import DraftGraphDrafter, DraftTreeDrafter
from outrider.drafters.model.language_model import LanguageModel
from outrider.drafters.model.pair import Pair
from outrider.drafters.model.union import UnionDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DraftGraphOptions, DraftTime, DraftTreeOptions
from outrider.verify.sampling.acceptance import decide
from outrider.verify.sampling_params import SamplingParams
from tests.drafts import Chaos, Driven
from tests.language import ToyModel
from tests.slow import mostly_slow

VOCABULARY = 4
RANDOM = np.random.default_rng(0)
TARGET = np.log(RANDOM.dirichlet(np.ones(VOCABULARY), VOCABULARY + 1)).astype(np.float32)  # [last token + 1, next token]
DRAFT = RANDOM.dirichlet(np.ones(VOCABULARY), VOCABULARY + 1)
TREE = DraftTreeOptions(2, 3, 0.2, 0.3, only_if_worth=False)


def fusion(time: DraftTime) -> Callable[[LanguageModel], Drafter]:
    """Guesses, and a draft model that drafts in every step."""
    return lambda model: UnionDrafter(Chaos(VOCABULARY), ModelChain(model, Pair(), 2, 2), Pair(), 2, time, time == "auto")


def alone(time: DraftTime, window: int = 0) -> Callable[[LanguageModel], Drafter]:
    """A draft model's chains, without guesses."""
    return lambda model: UnionDrafter(NoDrafter(), ModelChain(model, Pair(), window=window), Pair(), 2, time, False)


MAKE: dict[str, Callable[[LanguageModel], Drafter]] = {
    "draft": alone("before"),
    "draft-tree": lambda model: DraftTreeDrafter(model, TREE, Pair()),
    "draft-graph": lambda model: DraftGraphDrafter(
        model, DraftGraphOptions(2, 3, 0.2, 0.3, only_if_worth=False, tau=1), Pair()
    ),
    "pearl": alone("during", window=2),
    "fusion, before": fusion("before"),
    "fusion, during": fusion("during"),
    "fusion, auto": fusion("auto"),
}
# With samples and guesses; the others share most of their code with it.
FAST = "fusion, during"


@pytest.mark.parametrize("name", mostly_slow(MAKE, FAST))
def test_a_draft_models_drafts_keep_the_distribution(name: str) -> None:
    """Whole answers of three tokens, step by step, with sampled, merged and deterministic drafts."""
    random = np.random.default_rng(5)
    drafter = Driven(MAKE[name](ToyModel(DRAFT[1:], random)))
    answers, steps = np.zeros((VOCABULARY,) * 3, np.int64), 0
    for seed in range(2000):
        params, text = SamplingParams(seed=seed, rule="rejection"), [0]
        drafter.begin(np.array(text, np.int32), sampling=params)
        while len(text) < 4:
            tree = drafter.propose(12).limit(3 - len(text))
            targets = TARGET[np.concatenate([[text[-1] + 1], tree.tokens + 1])]
            rows, tokens, _ = decide(params, targets, tree, len(text) - 1)()
            drafter.observe(Verdict(tree, rows, tokens))
            text += tokens.tolist()
            steps += 1
        drafter.end()
        answers[text[1], text[2], text[3]] += 1
    successors = np.exp(TARGET[1:].astype(np.float64))
    joint = successors[0][:, None, None] * successors[:, :, None] * successors[None]
    expected = joint * answers.sum()
    rare = expected < 5  # pooled: the test is not valid for rare answers
    found, expected = (np.append(values[~rare], values[rare].sum()) for values in (answers, expected))
    assert ((found - expected) ** 2 / expected).sum() < 78.75  # 44 degrees of freedom, p = 0.001
    assert steps < 3 * 2000
