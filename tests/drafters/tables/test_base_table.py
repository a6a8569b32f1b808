"""The base table equals a dictionary model; unusable files are rejected."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables import array_file, base_table
from outrider.drafters.tables.array_file import ArrayFileError

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
