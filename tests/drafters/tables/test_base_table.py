"""The base table and adaptive rows equal dictionary models; unusable files are rejected."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables import array_file, base_table
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.learned_table import LearnedRows, absorb, learn, new_rows, successors

SEPARATOR = 9


Context = tuple[int, int, int]


def expected(texts: list[list[int]], successors: int, order: int) -> dict[Context, list[tuple[int, float]]]:
    counts: dict[Context, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for i in range(1, len(text)):
            counts[-1, -1, text[i - 1]][text[i]] += 1
            if i >= 2 and order >= 3:
                counts[-1, text[i - 2], text[i - 1]][text[i]] += 1
            if i >= 3 and order >= 4:
                counts[text[i - 3], text[i - 2], text[i - 1]][text[i]] += 1
    return {
        context: [(t, c / found.total()) for t, c in sorted(found.items(), key=lambda tc: (-tc[1], tc[0]))[:successors]]
        for context, found in counts.items()
    }


def rows(base: base_table.BaseArrays, context: Context) -> list[tuple[int, float]]:
    at = base_table.find(base, base_table.context_key(*context))
    if at < 0:
        return []
    part = slice(int(base.offsets[at]), int(base.offsets[at + 1]))
    return list(zip(base.tokens[part].tolist(), (base.probabilities[part] / base_table.PROBABILITY_UNIT).tolist(), strict=True))


@given(st.lists(st.lists(st.integers(0, 8), max_size=30), min_size=1, max_size=5), st.integers(1, 4), st.integers(2, 4))
def test_table_equals_counting(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], successors: int, order: int
) -> None:
    path = tmp_path_factory.mktemp("tables") / "t.ngram"
    blocks = [np.array([SEPARATOR, *text], np.uint32) for text in texts]
    counted = expected(texts, successors, order)
    assert base_table.build(path, blocks, "f", SEPARATOR, successors, order=order) == len(counted)
    base = base_table.load(path, "f")
    for context, found in counted.items():
        got = rows(base, context)
        assert [t for t, _ in got] == [t for t, _ in found]
        assert np.allclose([p for _, p in got], [p for _, p in found], atol=1e-4)
    assert rows(base, (-1, 8, 9)) == []


def test_a_size_bound_drops_rare_contexts_only(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).zipf(1.3, 60_000).clip(1, 500).astype(np.uint32)
    everything = base_table.build(tmp_path / "all", [tokens], "f", 0)
    some = base_table.build(tmp_path / "some", [tokens], "f", 0, max_bytes=60_000)
    assert some < everything
    assert (tmp_path / "some").stat().st_size <= 60_000
    common = base_table.context_key(-1, -1, 1)
    assert base_table.find(base_table.load(tmp_path / "some"), common) >= 0


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
