"""Fitting the mixture's prior on a small corpus."""

from pathlib import Path

import numpy as np
import pytest

from outrider.drafters.tables import array_file
from outrider.drafters.tables.contexts import LENGTHS
from outrider.drafters.tables.levels import BUCKETS, COPY, DIVERSITIES, PREDICTION, SIZES, TABLE
from outrider.drafters.tables.mixture import CELLS, MAX_BOOST
from outrider.models import TARGET
from training import fit_prior


def test_initial_trust_grows_with_the_tables_certainty_and_the_tokens_matched() -> None:
    trust = fit_prior.initial_trust()
    assert trust.shape == (BUCKETS,)
    by_source = trust.reshape(5, LENGTHS, SIZES, DIVERSITIES)
    assert np.all(by_source[:TABLE] == 0.5)
    assert np.all(np.diff(by_source[[TABLE, PREDICTION, COPY], 0, :, 0]) >= 0)
    assert by_source.max() < 1


@pytest.mark.slow  # compiles kernels that nothing else uses
def test_the_fit_learns_trust_in_repetition_and_writes_a_prior(tmp_path: Path) -> None:
    text = "def add(a, b):\n    return a + b\n\n\n" * 6
    for number in range(12):
        (tmp_path / f"{number}.txt").write_text(text)
    out = tmp_path / "prior.safetensors"
    fit_prior.main([tmp_path], str(TARGET), out)
    prior = array_file.load(out, "prior").arrays
    assert prior["trust"].shape == (BUCKETS,)
    assert prior["boost"].shape == (CELLS,)
    assert np.all((prior["trust"] > 0) & (prior["trust"] < 1))
    assert 0 < prior["boost"].min() <= prior["boost"].max() <= MAX_BOOST
    initial = fit_prior.initial_trust()
    assert prior["trust"].max() > 0.95 > initial[: BUCKETS // 2].max()  # the other documents hold the same text
