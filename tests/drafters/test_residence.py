"""Mapped blocks do not pile up in memory, and give the same answers after being given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from drafters import datastore
from drafters.draft import Verdict
from drafters.residence import STATM, Residence
from drafters.retrieval import RetrievalDrafter, RetrievalOptions
from drafters.suffix import index

TOKENS = np.random.default_rng(0).integers(0, 50, 400_000)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "s"
    datastore.build(folder, [TOKENS], 50, "f", "plan")
    return folder


def mapped_bytes() -> int:
    return int(STATM.read_text().split()[2]) * 4096


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say what is resident")
def test_memory_is_given_back(store: Path) -> None:
    corpus = datastore.load(store)
    size = sum(path.stat().st_size for path in store.iterdir())
    residence = Residence(corpus)
    before = mapped_bytes()
    for start in range(0, len(TOKENS) - 2048, 2048):
        assert int(corpus[0].tokens[start : start + 2048].sum()) == int(TOKENS[start : start + 2048].sum())
        residence.asked()
        assert mapped_bytes() - before < 0.1 * size + 2**18


def test_answers_are_those_of_memory(store: Path) -> None:
    mapped = RetrievalDrafter(datastore.load(store), RetrievalOptions())
    held = RetrievalDrafter([index(TOKENS, 50)], RetrievalOptions())
    for drafter in (mapped, held):
        drafter.begin(TOKENS[:5].astype(np.int32))
    for at in range(5, 400, 5):
        trees = [drafter.propose(16) for drafter in (mapped, held)]
        assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
        for drafter, tree in zip((mapped, held), trees, strict=True):
            drafter.observe(Verdict(tree, np.empty(0, np.int32), TOKENS[at : at + 5].astype(np.int32)))
