"""The mixture equals its formula, sums to at most one, and learns its trust; cells of the boost table."""

import numpy as np
import pytest

from outrider.drafters.tables.contexts import Contexts, Sources, enter, new_contexts
from outrider.drafters.tables.levels import BUCKETS, CORPUS, DISCOUNT, PREDICTION, SESSION, Scratch, bucket, new_scratch
from outrider.drafters.tables.mixture import CELLS, MIN_MASS, POWERS, cell, commit, load_prior, predict
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


def test_trust_grows_with_correct_levels() -> None:
    sources, contexts, scratch = session([VOCABULARY])
    for token in list(range(1, 11)) * 20:
        commit(sources, contexts, scratch, token)
    sure = bucket(SESSION, LONGEST_CONTEXT, 8, 1)
    assert sources.hits[sure] / sources.tries[sure] > 0.9
    assert max(predicted(sources, contexts, scratch).values()) > 0.9


def test_the_fitted_prior_has_valid_values() -> None:
    trust, boost = load_prior()
    assert trust.shape == (BUCKETS,)
    assert boost.shape == (CELLS,)
    assert np.all((trust > 0) & (trust < 1))
    assert np.all(boost > 0)


def test_committing_is_one_step_of_em() -> None:
    sources, contexts, scratch = session([VOCABULARY])
    sources = sources._replace(expected=np.array([1, 7], np.int32))
    contexts.expected[0] = (1, 0)
    score = commit(sources, contexts, scratch, 7)  # the prediction alone lists it, with share 1 and trust 1/2
    mixed = 0.5 * 1.0 + 0.5 * 1e-6
    assert score == pytest.approx(np.log(mixed))
    used = bucket(PREDICTION, 0, 1, 1)
    assert sources.hits[used] == pytest.approx(4.0 + 0.5 / mixed)
    assert sources.tries[used] == 9.0
    assert sources.tries.sum() == 8.0 * BUCKETS + 1.0  # no other level was listed
    assert commit(sources, contexts, scratch, 9) == pytest.approx(np.log(0.5e-6))  # the session's empty context lists 7 only


def test_predicted_tokens_record_their_first_level_and_agreement() -> None:
    sources, contexts, scratch = session([VOCABULARY, 1, 2, 3, 1, 2, 4])
    for token in (1, 2, 3, 1, 2):
        commit(sources, contexts, scratch, token)
    size = predict(sources, contexts, 0, scratch, 0.0)
    x = {token: i for i, token in enumerate(scratch.out[:size].tolist())}
    first = {token: (int(scratch.out_source[i]), int(scratch.out_length[i])) for token, i in x.items()}
    # "1 2" was followed by 3 in the session and by 3 and 4 in the corpus, "3 1 2" by 4 in the corpus.
    assert first == {4: (CORPUS, 5), 3: (SESSION, 2), 1: (SESSION, 0), 2: (SESSION, 0)}
    assert {token: int(scratch.out_agreement[i]) for token, i in x.items()} == {4: 1, 3: 3, 1: 3, 2: 3}


def test_a_prediction_counts_as_no_agreement() -> None:
    sources, contexts, scratch = session([VOCABULARY])
    sources = sources._replace(expected=np.array([1, 7], np.int32))
    contexts.expected[0] = (1, 0)
    assert predict(sources, contexts, 0, scratch, MIN_MASS) == 1
    assert (scratch.out[0], scratch.out_source[0], scratch.out_length[0], scratch.out_agreement[0]) == (7, PREDICTION, 0, 0)


@pytest.mark.parametrize(
    ("length", "agreement", "probability", "expected"),
    [
        (0, 0, 1.0, 0),
        (0, 0, 0.3, 1),  # 0.3 = 0.6 * 2 ** -1
        (3, 2, 0.3, (3 * 4 + 2) * POWERS + 1),
        (6, 3, 0.0625, (6 * 4 + 3) * POWERS + 3),  # 0.0625 = 0.5 * 2 ** -3
        (6, 3, 1e-9, CELLS - 1),
    ],
)
def test_cell_by_hand(length: int, agreement: int, probability: float, expected: int) -> None:
    _, _, scratch = session([VOCABULARY])
    scratch.out_length[2], scratch.out_agreement[2], scratch.probability[2] = length, agreement, probability
    assert cell(scratch, 2) == expected
