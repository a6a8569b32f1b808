"""Draft heads as on a GPU: caches in pages, and few rows by kernels, draft what a head over contiguous caches drafts."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import transformers
from packaging.version import Version

from outrider.drafters.interface import EMPTY
from outrider.verify.heads.model import HeadCache, HeadModel, HeadRunner
from outrider.verify.model.gpu.paged_cache import PagedCache
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier
from tests.verify.heads.checkpoints import load_pair
from tests.verify.model.gpu.conftest import DEVICE

GREEDY = SamplingParams(temperature=0)
KEPT_STATES = 24
# Earlier versions look for the layer under other names than the tests' checkpoint has.
LOADS_MTP = pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="needs transformers 5.23")
Pair = tuple[ModelRunner, HeadModel]


def drafts(pair: Pair, tokens: int) -> tuple[list[list[list[int]]], HeadCache]:
    """Candidates after a text of `tokens`, and below some of them, before and after the target emits one; and the cache."""
    target, head = pair
    target.cache_shape = replace(target.cache_shape, hidden_positions=KEPT_STATES)
    pool = cast(TorchRunner, target)._pool
    if pool is not None:
        pool.shape = target.cache_shape
    shared = HeadRunner(head)
    verifier, session = Verifier(target, target.new_cache()), shared.session()
    verifier.begin((np.arange(tokens) % 90).astype(np.int32), GREEDY, 8)
    verifier.prefill()
    session.begin(verifier.sequence)
    found = []
    for _ in range(2):
        root = session.root(3).tokens
        below = session.expand(root[0, :2].tolist(), [0, 0], 3).tokens
        deeper = session.expand([below[1, 2]], [2], 3).tokens
        found += [root.tolist(), below.tolist(), deeper.tolist()]
        verdict = verifier.verify(EMPTY)
        verifier.commit(verdict)
        session.advance(verdict.tokens)
    cache = next(iter(shared._caches.values()))
    assert isinstance(cache, HeadCache)
    return found, cache


@pytest.mark.parametrize("tokens", [12, pytest.param(70, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", pytest.param("mtp", marks=[pytest.mark.slow, LOADS_MTP])])
def test_a_head_in_pages_drafts_the_same(kind: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a text whose first states were not kept."""
    expected, reference = drafts(load_pair(tmp_path, kind), tokens)
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    found, cache = drafts(load_pair(tmp_path, kind, device=DEVICE.type), tokens)
    assert found == expected
    assert isinstance(cache.rows, PagedCache)
    assert (cache.first, cache.length) == (reference.first, reference.length)
    assert (cache.first > 1) == (tokens > KEPT_STATES)  # no state is before the first token
