"""The mixture equals its formula, sums to at most one, and learns its trust; cells of the boost table."""

import numpy as np
import pytest

from outrider.drafters.tables.contexts import Contexts, Sources, enter, new_contexts
from outrider.drafters.tables.levels import BUCKETS, DISCOUNT, Scratch, new_scratch
from outrider.drafters.tables.mixture import CELLS, MIN_MASS, commit, load_prior, predict
from outrider.drafters.tables.suffix import LONGEST_CONTEXT, index
from tests.drafters.tables.sources import new_sources

VOCABULARY = 50


def session(corpus: list[int], trust: float = 0.5) -> tuple[Sources, Contexts, Scratch]:
    block = index(np.array(corpus, np.int64), VOCABULARY)
    sources = new_sources((block,), trust, 8.0)
    contexts = new_contexts(4, 1)
    enter(sources, contexts, np.empty(0, np.int32))
    return sources, contexts, new_scratch(VOCABULARY + 1, 1, 8)


def predicted(sources: Sources, contexts: Contexts, scratch: Scratch) -> dict[int, float]:
    size = predict(sources, contexts, 0, scratch, MIN_MASS)
    return dict(zip(scratch.out[:size].tolist(), scratch.probability[:size].tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_probabilities_sum_to_at_most_one_and_match_commit(seed: int) -> None:
    random = np.random.default_rng(seed)
    corpus = random.zipf(1.5, 4000).clip(1, 40).tolist()
    sources, contexts, scratch = session([VOCABULARY, *corpus])
    for token in random.zipf(1.5, 500).clip(1, 40).tolist():
        found = predicted(sources, contexts, scratch)
        assert all(p > 0 for p in found.values())
        assert sum(found.values()) <= 1 + 1e-9
        score = commit(sources, contexts, scratch, token)
        if token in found and found[token] > 1e-3:
            assert score == pytest.approx(np.log(found[token]), abs=0.2)


def test_probabilities_equal_the_formula() -> None:
    """One session without a corpus: contexts of all lengths, equal trust, absolute discount."""
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    sources, contexts, scratch = session([VOCABULARY], trust=0.5)
    sources.tries[:] = 1e9  # too many tries for the trust to change
    sources.hits[:] = 0.5e9
    for token in text:
        commit(sources, contexts, scratch, token)
    expected: dict[int, float] = {}
    remaining, longer_total = 1.0, -1
    for length in range(LONGEST_CONTEXT, -1, -1):
        context = text[len(text) - length :]
        after = [text[i] for i in range(length, len(text)) if text[i - length : i] == context]
        if not after or len(after) == longer_total:
            continue
        longer_total = len(after)
        kinds = len(set(after))
        cut = DISCOUNT if len(after) > 1 and len(after) > DISCOUNT * kinds else 0.0
        for token in set(after):
            share = (after.count(token) - cut) / (len(after) - cut * kinds)
            expected[token] = expected.get(token, 0.0) + remaining * 0.5 * share
        remaining *= 0.5
    assert predicted(sources, contexts, scratch) == pytest.approx(expected)


def test_the_fitted_prior_has_valid_values() -> None:
    trust, boost = load_prior()
    assert trust.shape == (BUCKETS,)
    assert boost.shape == (CELLS,)
    assert np.all((trust > 0) & (trust < 1))
    assert np.all(boost > 0)
