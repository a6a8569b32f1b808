"""`rejection`: answers successors the target's own distribution, shown by chi-square over a toy model's sequences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from drafters.draft import DraftDrafter
from drafters.draft_graph import DraftGraphDrafter
from drafters.draft_tree import DraftTreeDrafter
from drafters.interface import Drafter, DraftTree, Ints, Verdict
from drafters.model.language_model import LanguageModel
from drafters.none import NoDrafter
from drafters.options import DraftGraphOptions, DraftOptions, DraftTreeOptions, PearlOptions
from drafters.pearl import PearlDrafter
from tests.drafts import Chaos, Driven
from tests.language import ToyModel
from verify.acceptance import Keyed, Rejection, rule_of
from verify.decode import DecodeOptions, decode
from verify.model.runner import ModelRunner
from verify.sampling_params import SamplingParams
from verify.verifier import TreeVerifier

VOCABULARY, DRAWS = 4, 200_000
RANDOM = np.random.default_rng(0)
TARGET = torch.log(torch.from_numpy(RANDOM.dirichlet(np.ones(VOCABULARY), VOCABULARY + 1)))  # [last token + 1, next token]
DRAFT = RANDOM.dirichlet(np.ones(VOCABULARY), VOCABULARY + 1)


def sampled_tree(branches: tuple[int, ...], random: np.random.Generator) -> DraftTree:
    """A tree whose nodes are drawn from DRAFT, `branches[d]` children at depth d, without replacement."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []

    def grow(parent: int, last: int, depth: int) -> None:
        if depth == len(branches):
            return
        remaining = DRAFT[last + 1].copy()
        for _ in range(branches[depth]):
            token = int(np.searchsorted(np.cumsum(remaining) / remaining.sum(), random.random(), "right"))
            remaining[token] = 0.0
            row = len(tokens)
            tokens.append(token)
            parents.append(parent)
            depths.append(depth + 1)
            grow(row, token, depth + 1)

    grow(-1, -1, 0)
    q = DRAFT[[0, *(token + 1 for token in tokens)]].astype(np.float32)
    size = len(tokens)
    shape = (np.array(tokens, np.int32), np.array(parents, np.int32), np.array(depths, np.int32))
    return DraftTree(*shape, np.ones(size, np.float32), np.zeros(size, np.uint8), q)


def two_tokens(tree: DraftTree, seed: int, random: np.random.Generator) -> tuple[int, int]:
    """The first two tokens of an answer: one step over `tree`, then a plain sample if it emitted one token only."""
    logits = TARGET[[0, *(tree.tokens + 1)]]
    _, emitted, _ = Rejection(SamplingParams(seed=seed)).decide(logits, tree, 0)
    if len(emitted) > 1:
        return int(emitted[0]), int(emitted[1])
    successors = TARGET[emitted[0] + 1].exp().numpy()
    return int(emitted[0]), int(np.searchsorted(np.cumsum(successors) / successors.sum(), random.random(), "right"))


def chi_square(counts: NDArray[np.int64]) -> float:
    joint = (TARGET[0].exp()[:, None] * TARGET[1:].exp()).numpy()
    expected = joint * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.slow
@pytest.mark.parametrize("branches", [(1, 1), (2, 2), (3, 1)])
@pytest.mark.parametrize("with_q", [True, False])
def test_answers_follow_the_target(branches: tuple[int, ...], with_q: bool) -> None:
    random = np.random.default_rng(1)
    fixed = sampled_tree(branches, random)
    fixed = DraftTree(fixed.tokens, fixed.parents, fixed.depths, fixed.probability, fixed.source)
    counts = np.zeros((VOCABULARY, VOCABULARY), np.int64)
    for seed in range(DRAWS // 6):  # 200,000 over the six cases
        tree = sampled_tree(branches, random) if with_q else fixed
        counts[two_tokens(tree, seed, random)] += 1
    assert chi_square(counts) < 37.70  # 15 degrees of freedom, p = 0.001


TREE = DraftTreeOptions(2, 3, 0.2, 0.3, thrifty=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: DraftDrafter(model, DraftOptions(2, 0.2, thrifty=False)),
        lambda model: DraftTreeDrafter(model, TREE),
        lambda model: DraftGraphDrafter(model, DraftGraphOptions(2, 3, 0.2, 0.3, thrifty=False, tau=1)),
        lambda model: PearlDrafter(model, PearlOptions(window=2)),
    ],
    ids=["draft", "draft-tree", "draft-graph", "pearl"],
)
def test_a_draft_models_drafts_keep_the_distribution(make: Callable[[LanguageModel], Drafter]) -> None:
    """Whole answers of three tokens, step by step, with sampled, merged and deterministic drafts."""
    random = np.random.default_rng(5)
    drafter = Driven(make(ToyModel(DRAFT[1:], random)))
    answers, accepted = np.zeros((VOCABULARY,) * 3, np.int64), 0
    for seed in range(4000):
        rule, text = Rejection(SamplingParams(seed=seed)), [0]
        drafter.begin(np.array(text, np.int32), sampling=SamplingParams(seed=seed, rule="rejection"))
        while len(text) < 4:
            tree = drafter.propose(12).limit(3 - len(text))
            rows, tokens, _ = rule.decide(TARGET[[text[-1] + 1, *(tree.tokens + 1)]], tree, len(text) - 1)
            drafter.observe(Verdict(tree, rows, tokens))
            text += tokens.tolist()
            accepted += len(rows)
        drafter.end()
        answers[text[1], text[2], text[3]] += 1
    successors = TARGET[1:].exp().numpy()
    joint = successors[0][:, None, None] * successors[:, :, None] * successors[None]
    expected = joint * answers.sum()
    assert ((answers - expected) ** 2 / expected).sum() < 103.4  # 63 degrees of freedom, p = 0.001
    assert accepted > 100


def test_a_draft_like_the_target_is_always_accepted() -> None:
    random = np.random.default_rng(2)
    for seed in range(200):
        tree = sampled_tree((1, 1), random)
        logits = torch.log(torch.from_numpy(DRAFT))[[0, *(tree.tokens + 1)]]
        rows, emitted, _ = Rejection(SamplingParams(seed=seed)).decide(logits, tree, 0)
        assert rows.tolist() == [0, 1]
        assert emitted[:2].tolist() == tree.tokens.tolist()


def test_greedy_decoding_is_always_keyed() -> None:
    assert isinstance(rule_of(SamplingParams(temperature=0, rule="rejection")), Keyed)
    assert isinstance(rule_of(SamplingParams(rule="rejection")), Rejection)


def test_rejection_respects_the_sampling_parameters(tiny_runner: ModelRunner) -> None:
    """Tokens that top-k excludes are never emitted, and a seed reproduces the answer."""
    prompt: Ints = np.arange(3, 15, dtype=np.int32)
    options = DecodeOptions(SamplingParams(seed=3, rule="rejection", top_k=1, temperature=1.0), 30)
    greedy = DecodeOptions(SamplingParams(temperature=0), 30)
    drafted = decode(TreeVerifier(tiny_runner, tiny_runner.new_cache()), Chaos(97), prompt, options).tokens
    assert drafted == decode(TreeVerifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), prompt, greedy).tokens
    free = DecodeOptions(SamplingParams(seed=3, rule="rejection"), 30)
    answers = [decode(TreeVerifier(tiny_runner, tiny_runner.new_cache()), Chaos(97), prompt, free).tokens for _ in range(2)]
    assert answers[0] == answers[1]
