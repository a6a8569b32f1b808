"""Chains of drafts for a model whose layers keep states."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafters.interface import Source, chain
from outrider.verify.model.batch import ForwardBatch

pytest.importorskip("llama_cpp")
from outrider.verify.model.llama.runner import LlamaRunner
from outrider.verify.model.llama.stateful import StatefulCache
from tests.verify.model.llama.models import write_mamba

pytestmark = [pytest.mark.llama, pytest.mark.xdist_group("llama")]
VOCABULARY, ROUNDING = 512, 1e-3


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaRunner]:
    file = tmp_path_factory.mktemp("mamba") / "mamba.gguf"
    write_mamba(file, vocabulary=VOCABULARY)
    found = LlamaRunner(file, 512, on_gpu=False)
    found.threads = 1
    found.start(512)
    yield found


@pytest.fixture
def cache(runner: LlamaRunner) -> Iterator[StatefulCache]:
    found = runner.new_cache()
    assert isinstance(found, StatefulCache)
    yield found


def words(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(VOCABULARY), k=count)


def read(runner: LlamaRunner, cache: StatefulCache, tokens: list[int]) -> None:
    runner.forward(cache, ForwardBatch.chain(tokens), logits=False)
    cache.length += len(tokens)


def step(runner: LlamaRunner, cache: StatefulCache, batch: ForwardBatch) -> Any:
    """The logits of rows, [N, V], which are not committed."""
    return runner.forward(cache, batch).copy()


def after(runner: LlamaRunner, text: list[int]) -> Any:
    """The logits after a text."""
    return runner.forward(runner.new_cache(), ForwardBatch.chain(text))[-1].copy()


def same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return float(np.abs(found - expected).max()) < ROUNDING


@pytest.mark.parametrize("accepted", range(1, 6))
def test_what_is_accepted_of_a_chain_is_the_text(runner: LlamaRunner, cache: StatefulCache, accepted: int) -> None:
    prompt, drafts, last = words(9), words(5, seed=1), words(1, seed=2)
    read(runner, cache, prompt)
    tree = chain(np.array(drafts[1:], np.int32), np.ones(4, np.float32), Source.NONE)
    logits = step(runner, cache, ForwardBatch.tree(drafts[0], tree))
    assert same(logits[accepted - 1], after(runner, [*prompt, *drafts[:accepted]]))
    cache.commit(list(range(accepted)))
    assert cache.length == len(prompt) + accepted
    assert same(step(runner, cache, ForwardBatch.chain(last))[0], after(runner, [*prompt, *drafts[:accepted], *last]))


def test_a_session_is_copied_whole_or_begins_anew(runner: LlamaRunner, cache: StatefulCache) -> None:
    text, last = words(300), words(1, seed=2)
    read(runner, cache, text)
    forked, cut = runner.new_cache(), runner.new_cache()
    assert isinstance(forked, StatefulCache)
    forked.fork(cache, 300)
    cut.fork(cache, 299)
    assert (forked.length, cut.length) == (300, 0)
    assert same(step(runner, forked, ForwardBatch.chain(last))[0], after(runner, [*text, *last]))
    cache.truncate(300)
    assert cache.length == 300
    assert cache.swap_out().length == cache.length == 0
