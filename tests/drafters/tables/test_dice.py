"""The dice: noise equal to the target's, unchanged greedy drafts, equal answers and calibrated probabilities."""

from collections.abc import Callable
from functools import cache
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.drafters.fusion import FusionDrafter
from outrider.drafters.interface import Drafter, DraftTree, Ints, Verdict
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.noise import mix
from outrider.drafters.options import FusionOptions, LookupOptions, RetrievalOptions, TrigramOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.dice import exponential, position_key, random_bits
from outrider.drafters.tables.suffix import Corpus, index
from outrider.drafters.trigram import TrigramDrafter
from outrider.verify.sampling import sampler as sampling
from outrider.verify.sampling.acceptance import walk
from outrider.verify.sampling.sampler import choose
from outrider.verify.sampling_params import SamplingParams

VOCABULARY = 97
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 60).astype(np.int32)


def fusion(vocabulary: int = VOCABULARY) -> FusionDrafter:
    return FusionDrafter(empty_base(), [], FusionOptions(capacity=1024), vocabulary)


@cache
def corpus(vocabulary: int) -> Corpus:
    """A text of the model of `simulate`, and the prompt of the other tests."""
    return index(np.concatenate([sampled(bigrams(), 50, 2000), TEXT]).astype(np.int64), vocabulary)


DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "fusion": fusion,
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
