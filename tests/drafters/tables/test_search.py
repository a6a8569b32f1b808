"""Searches give well-formed trees with brute force's nodes; the dice's noise is the target's, and changes no greedy draft."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import MAX_NODES, Drafter, DraftTree, Ints, Verdict
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.noise import mix
from outrider.drafters.options import FusionOptions, LookupOptions, RetrievalOptions, TrigramOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables import base_table
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.dice import new_dice
from outrider.drafters.tables.learned_table import learn, new_rows
from outrider.drafters.tables.nodes import Nodes, choose_likeliest, draft_tree, new_nodes
from outrider.drafters.tables.suffix import Corpus, index
from outrider.drafters.trigram import TrigramDrafter, Trigrams, best_first, new_pool
from outrider.verify.sampling import sampler as sampling
from outrider.verify.sampling.acceptance import walk
from outrider.verify.sampling.sampler import choose
from outrider.verify.sampling_params import SamplingParams
from tests.drafters.tables.internals import exponential, position_key, random_bits, reset, successors
from tests.trees import check, trees

BASE = base_table.empty_base()


def search(text: list[int], budget: int, depth: int, order: int = 3) -> DraftTree:
    rows, pool = new_rows(1024, 6), new_pool(1 + 6 * MAX_NODES, 6)
    learn(BASE, rows, np.array(text, np.int32), len(text), order, 1.0, 16.0)
    ending = np.array([-1, *text], np.int32)[-3:]
    size = best_first(Trigrams(BASE, rows, order), pool, ending, depth, budget, 0.0, new_dice())
    return draft_tree(pool.nodes, size, budget)


texts = st.lists(st.integers(0, 9), min_size=2, max_size=200)


@given(text=texts, budget=st.integers(1, MAX_NODES), depth=st.integers(1, 6), order=st.integers(2, 4))
def test_trees_are_well_formed_bounded_and_repeatable(text: list[int], budget: int, depth: int, order: int) -> None:
    tree = search(text, budget, depth, order)
    check(tree)
    assert len(tree) <= budget
    assert not len(tree) or tree.depths.max() <= depth
    again = search(text, budget, depth, order)
    assert tree.tokens.tolist() == again.tokens.tolist()
    assert tree.parents.tolist() == again.parents.tolist()


@given(text=texts, budget=st.integers(1, 40))
def test_best_first_takes_the_likeliest_nodes(text: list[int], budget: int) -> None:
    tree = search(text, budget, depth=3)
    everything = all_paths(text, depth=3)
    likeliest = sorted(everything.values(), reverse=True)[:budget]
    assert np.allclose(sorted(tree.probability, reverse=True), likeliest, rtol=1e-4)


def all_paths(text: list[int], depth: int) -> dict[tuple[int, ...], float]:
    """Every path of up to `depth` tokens with its probability, by brute force over the same table."""
    rows = new_rows(1024, 6)
    learn(BASE, rows, np.array(text, np.int32), len(text), 3, 1.0, 16.0)
    found: dict[tuple[int, ...], float] = {}

    def grow(path: tuple[int, ...], probability: float) -> None:
        tokens, shares = np.zeros(6, np.int32), np.zeros(6, np.float32)
        before = (*text, *path)
        for i in range(successors(BASE, rows, -1, before[-2], before[-1], 3, tokens, shares)):
            longer = (*path, int(tokens[i]))
            found[longer] = probability * float(shares[i])
            if len(longer) < depth:
                grow(longer, found[longer])

    grow((), 1.0)
    return found


def shuffled(tree: DraftTree, seed: int) -> Nodes:
    """The tree's nodes in a random order with parents before children."""
    size = len(tree)
    nodes = new_nodes(size + 1)
    reset(nodes, 0)
    keys = np.random.default_rng(seed).random(size) + tree.depths
    order = np.argsort(keys)
    place = np.empty(size, np.int64)
    place[order] = np.arange(1, size + 1)
    nodes.tokens[1:] = tree.tokens[order]
    nodes.parents[1:] = [0 if p < 0 else place[p] for p in tree.parents[order]]
    nodes.depths[1:] = tree.depths[order]
    nodes.path[1:] = tree.probability[order]
    nodes.source[1:] = tree.source[order]
    return nodes


@given(trees(), st.integers(0, 5), st.integers(1, 30))
def test_the_likeliest_nodes_make_the_tree(tree: DraftTree, seed: int, budget: int) -> None:
    nodes = shuffled(tree, seed)
    choose_likeliest(nodes, len(tree) + 1, budget)
    draft = draft_tree(nodes, len(tree) + 1, budget)
    check(draft)
    assert len(draft) == min(budget, len(tree))
    assert sorted(draft.probability)[::-1] == sorted(tree.probability)[::-1][: len(draft)]
    for parent in range(-1, len(draft)):
        siblings = draft.probability[draft.parents == parent]
        assert np.all(np.diff(siblings) <= 0)


VOCABULARY = 97
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 60).astype(np.int32)


@cache
def corpus(vocabulary: int) -> Corpus:
    """A text of the model of `simulate`, and the prompt of the other tests."""
    return index(np.concatenate([sampled(bigrams(), 50, 2000), TEXT]).astype(np.int64), vocabulary)


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "fusion": lambda vocabulary: FusionDrafter(empty_base(), [], FusionOptions(capacity=1024), vocabulary),
    "trigram": lambda _: TrigramDrafter(empty_base(), TrigramOptions()),
    "lookup": lambda _: LookupDrafter(LookupOptions(shortest=1)),
    "retrieval": lambda vocabulary: RetrievalDrafter([corpus(vocabulary)], RetrievalOptions()),
}
# Where a context has few successors, there is little to choose from: `lookup` follows the longest one.
GAINS = {"fusion": 1.05, "trigram": 1.05, "lookup": 1.0, "retrieval": 1.05}
EACH = pytest.mark.parametrize("name", DRAFTERS)


def drafted(params: SamplingParams | None, name: str = "fusion", text: Ints = TEXT) -> DraftTree:
    drafter = DRAFTERS[name](VOCABULARY)
    drafter.begin(Sequence(text), sampling=params)
    return drafter.propose(48)


@given(st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 31), st.integers(0, (1 << 31) - 1))
def test_the_noise_of_a_token_is_the_targets(seed: int, position: int, token: int) -> None:
    key = np.uint64(position_key(np.uint64(mix(seed)), position))  # a kernel returns a Python integer
    bits = np.uint64(random_bits(key, token))
    assert int(bits) == int(sampling.random_bits(seed, position, np.array([token]))[0])
    noise = float(sampling.gumbel(seed, position, np.array([token]))[0])
    assert -np.log(exponential(bits)) == pytest.approx(noise, abs=1e-5)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0, seed=5), SamplingParams(seed=5, rule="rejection"), SamplingParams(seed=5, top_k=1)]
)
@EACH
def test_drafts_ignore_noise_that_decides_nothing(name: str, params: SamplingParams) -> None:
    expected, found = drafted(None, name), drafted(params, name)
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert found.probability.tolist() == expected.probability.tolist()


Noise = Literal["used", "ignored"]


def bigrams() -> NDArray[np.float32]:
    """The logarithms of a bi-gram model's probabilities, [VOCABULARY, VOCABULARY]."""
    random = np.random.default_rng(1)
    return np.log(random.dirichlet(np.full(VOCABULARY, 0.1), VOCABULARY)).astype(np.float32)


def simulate(noise: Noise, name: str, requests: int = 12) -> tuple[float, float]:
    """Answers of a bi-gram model whose text the drafter has read: tokens per step, and expected per accepted token."""
    table = bigrams()
    steps, tokens, expected, accepted = 0, 0, 0.0, 0
    for seed in range(requests):
        params = SamplingParams(seed=seed)
        sequence = Sequence(sampled(table, 100 + seed, 600))
        drafter = DRAFTERS[name](VOCABULARY)
        drafter.begin(sequence, sampling=params if noise == "used" else None)
        while sequence.emitted < 100:
            tree = drafter.propose(16)
            rows, emitted = step(table, params, sequence, tree)
            expected += float(tree.probability.sum())
            steps, tokens, accepted = steps + 1, tokens + len(emitted), accepted + len(rows)
            sequence.append(emitted)
            drafter.observe(Verdict(tree, rows, emitted))
    return tokens / steps, expected / accepted


def step(table: NDArray[np.float32], params: SamplingParams, sequence: Sequence, tree: DraftTree) -> tuple[Ints, Ints]:
    """The accepted rows and emitted tokens of one step."""
    last = [int(sequence.tokens[-1]), *tree.tokens.tolist()]
    depths = [0, *tree.depths.tolist()]
    return walk(tree, lambda row: choose(table[last[row]], params, sequence.emitted + depths[row]))


def sampled(table: NDArray[np.float32], seed: int, size: int) -> Ints:
    """A text of the bi-gram model, int32 [size]."""
    text = [0]
    while len(text) < size:
        text.append(choose(table[text[-1]], SamplingParams(seed=seed), len(text)))
    return np.array(text, np.int32)


@EACH
def test_noise_adds_tokens_per_step_and_probabilities_do_not_become_too_high(name: str) -> None:
    """The tables know this target nearly exactly, so noise decides more than it is trusted to."""
    (without, before), (tokens_per_step, ratio) = simulate("ignored", name), simulate("used", name)
    assert tokens_per_step > GAINS[name] * without
    assert 0.5 < ratio < 1.1 * max(1.0, before)
