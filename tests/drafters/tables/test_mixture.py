"""The mixture equals its formula, its tables and rows equal dictionary models, and successors in the text equal brute force."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables import array_file, base_table
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.learned_table import LearnedRows, absorb, learn, new_rows
from outrider.drafters.tables.mixture import (
    BUCKETS,
    CELLS,
    COPY_STATE,
    MAX_RECENT,
    Contexts,
    Scratch,
    Sources,
    enter,
    load_prior,
    new_contexts,
    new_history,
    new_scratch,
)
from outrider.drafters.tables.suffix import LONGEST_CONTEXT, index
from tests.drafters.tables.internals import (
    DISCOUNT,
    MAX_GAP,
    MAX_OCCURRENCES,
    MIN_MASS,
    POSITION,
    append,
    commit,
    context_key,
    extend_hashes,
    find,
    find_copy,
    follow_copy,
    followers,
    predict,
    successors,
)

VOCABULARY = 50


def session(corpus: list[int], trust: float = 0.5) -> tuple[Sources, Contexts, Scratch]:
    """Empty session state over a corpus; all levels have the same `trust`, from 8 tokens."""
    block = index(np.array(corpus, np.int64), VOCABULARY)
    expected, boost = np.zeros(1, np.int32), np.ones(CELLS)
    hits, tries = np.full(BUCKETS, 8 * trust), np.full(BUCKETS, 8.0)
    sources = Sources((block,), new_history(512), empty_base(), new_rows(64, 4), expected, hits, tries, boost)
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


SPAN = list(range(100, 160))


def copy_after(text: list[int], capacity: int = 512) -> list[int]:
    """The state of the copy at the end of a text."""
    history = new_history(capacity)
    hashes = np.zeros(LONGEST_CONTEXT + 1, np.uint64)
    copy = np.full(COPY_STATE, -1, np.int64)
    for previous, token in zip([-1, *text], text, strict=False):
        append(history, hashes, token)
        extend_hashes(hashes, token, hashes)
        follow_copy(history, copy, previous, token, copy, True)
        find_copy(history, hashes[LONGEST_CONTEXT], copy)
    state: list[int] = copy.tolist()
    return state


@pytest.mark.parametrize(
    ("answer", "position"),
    [
        (SPAN[:20], 20),
        ([*SPAN[:20], 7], 21),  # a token replaced
        ([*SPAN[:20], 7, SPAN[20]], 21),  # a token inserted
        ([*SPAN[:20], *SPAN[23:24]], 24),  # three tokens left out
        ([*SPAN[:20], 7, 8, 9, SPAN[23]], 24),  # three tokens replaced
        ([*SPAN[:20], *range(7, 7 + MAX_GAP)], 20 + MAX_GAP),
    ],
)
def test_a_copy_goes_on_after_a_change(answer: list[int], position: int) -> None:
    assert copy_after([*SPAN, 1, 2, *answer])[POSITION] == position


def test_a_copy_ends_after_many_changes_and_where_its_span_ends() -> None:
    assert copy_after([*SPAN, 1, 2, *SPAN[:20], *range(7, 8 + MAX_GAP)])[POSITION] == -1
    assert copy_after([*SPAN, *SPAN[:5]])[POSITION] == -1  # too short
    assert copy_after([*SPAN[:20], *range(300, 800), *SPAN[:20]], 512)[POSITION] == -1  # overwritten


@given(st.lists(st.integers(0, 3), max_size=200), st.sampled_from([16, 256]))
def test_followers_are_those_of_the_latest_occurrences(text: list[int], capacity: int) -> None:
    history = new_history(capacity)
    hashes = np.zeros(LONGEST_CONTEXT + 1, np.uint64)
    for token in text:
        append(history, hashes, token)
        extend_hashes(hashes, token, hashes)
    tokens, counts = np.zeros(256, np.int64), np.zeros(256)
    for length in range(min(LONGEST_CONTEXT, len(text)) + 1):
        context = text[len(text) - length :]
        first = max(length, len(text) - capacity)
        positions = [i for i in range(first, len(text)) if text[i - length : i] == context]
        positions = positions[-(MAX_OCCURRENCES if length else MAX_RECENT) :]
        end, total = followers(history, length, hashes[length], tokens, counts, 0)
        assert total == len(positions)
        found = dict(zip(tokens[:end].tolist(), counts[:end].tolist(), strict=True))
        assert found == dict(Counter(text[i] for i in positions))


SEPARATOR = 9


Context = tuple[int, int, int]


def expected(texts: list[list[int]], successors: int) -> dict[Context, list[tuple[int, float]]]:
    counts: dict[Context, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for i in range(1, len(text)):
            counts[-1, -1, text[i - 1]][text[i]] += 1
            if i >= 2:
                counts[-1, text[i - 2], text[i - 1]][text[i]] += 1
    return {
        context: [(t, c / found.total()) for t, c in sorted(found.items(), key=lambda tc: (-tc[1], tc[0]))[:successors]]
        for context, found in counts.items()
    }


def rows(base: base_table.BaseArrays, context: Context) -> list[tuple[int, float]]:
    at = find(base, context_key(*context))
    if at < 0:
        return []
    part = slice(int(base.offsets[at]), int(base.offsets[at + 1]))
    return list(zip(base.tokens[part].tolist(), (base.probabilities[part] / base_table.PROBABILITY_UNIT).tolist(), strict=True))


@given(st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=5), st.integers(1, 4))
def test_table_equals_counting(tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], successors: int) -> None:
    path = tmp_path_factory.mktemp("tables") / "t.ngram"
    blocks = [np.array([SEPARATOR, *text], np.uint32) for text in texts]
    counted = expected(texts, successors)
    assert base_table.build(path, blocks, "f", SEPARATOR, successors) == len(counted)
    base = base_table.load(path, "f")
    for context, found in counted.items():
        got = rows(base, context)
        assert [t for t, _ in got] == [t for t, _ in found]
        assert np.allclose([p for _, p in got], [p for _, p in found], atol=1e-4)
    assert rows(base, (-1, 8, 9)) == []


def test_an_inconsistent_table_is_rejected(tmp_path: Path) -> None:
    base_table.build(tmp_path / "t", [np.array([1, 2, 3, 1, 2, 4], np.uint32)], "f", 9)
    arrays = dict(array_file.load(tmp_path / "t", base_table.KIND).arrays)
    for name, changed in (
        ("tokens", arrays["tokens"][1:]),
        ("offsets", arrays["offsets"][::-1]),
        ("keys", arrays["keys"][:-1]),
    ):
        array_file.save(tmp_path / "damaged", base_table.KIND, "f", arrays | {name: changed})
        with pytest.raises(ArrayFileError, match="is damaged"):
            base_table.load(tmp_path / "damaged")
        array_file.save(tmp_path / "lacking", base_table.KIND, "f", {key: arrays[key] for key in arrays if key != name})
        with pytest.raises(ArrayFileError, match="lacks arrays of an n-gram table"):
            base_table.load(tmp_path / "lacking")


BASE = base_table.empty_base()


def lookup(rows: LearnedRows, previous: int, last: int, size: int = 8) -> dict[int, float]:
    tokens, probabilities = np.zeros(size, np.int32), np.zeros(size, np.float32)
    found = successors(BASE, rows, -1, previous, last, 3, tokens, probabilities)
    assert np.all(np.diff(probabilities[:found]) <= 0)
    return dict(zip(tokens[:found].tolist(), probabilities[:found].tolist(), strict=True))


@given(st.lists(st.integers(0, 5), min_size=2, max_size=60))
def test_probabilities_equal_a_dictionary_model(text: list[int]) -> None:
    rows = new_rows(1024, 8)
    learn(BASE, rows, np.array(text, np.int32), len(text), 3, 1.0, 1000.0)
    counts: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for i in range(1, len(text)):
        counts[-1, text[i - 1]][text[i]] += 1
        if i >= 2:
            counts[text[i - 2], text[i - 1]][text[i]] += 1
    found_rows = lookup(rows, text[-2], text[-1])
    expected: dict[int, float] = defaultdict(float)
    remaining = 1.0
    for context in ((text[-2], text[-1]), (-1, text[-1])):
        found = counts.get(context, {})
        total = 1.0 + sum(found.values())  # 1 = missing mass of a context that is not in the base table
        for token, count in found.items():
            expected[token] += remaining * count / total
        remaining -= remaining * sum(found.values()) / total
    assert found_rows.keys() == expected.keys()
    assert all(abs(found_rows[t] - expected[t]) < 1e-5 for t in expected)
    assert sum(found_rows.values()) < 1.0


def test_the_targets_distribution_is_absorbed_at_every_node() -> None:
    rows = new_rows(64, 8)
    text = np.array([-1, 1, 2], np.int32)
    tokens, parents = np.array([3, 4, 5], np.int32), np.array([-1, 0, -1], np.int32)
    ids = np.array([[3, 5], [4, 9], [6, 7], [8, 0]], np.int32)
    probabilities = np.array([[0.6, 0.3], [0.5, 0.2], [0.9, 0.1], [0.4, 0.4]], np.float32)
    absorb(BASE, rows, text, tokens, parents, ids, probabilities, 3)
    assert list(lookup(rows, 1, 2)) == [3, 5]
    assert list(lookup(rows, 2, 3)) == [4, 9]
    assert list(lookup(rows, 3, 4)) == [6, 7]
    assert set(lookup(rows, 2, 5)) == {8, 0}  # rejected nodes are absorbed, too
    assert list(lookup(rows, 0, 3)) == [4, 9]  # an unseen context backs off to its last token
    assert lookup(rows, 0, 3)[4] < lookup(rows, 2, 3)[4]
    assert sum(lookup(rows, 1, 2).values()) <= 1.0 + 1e-6
