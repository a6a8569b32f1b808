"""States of recurrent layers: the bits of a text read at once, whatever was drafted, cut, forked or swapped before."""

import numpy as np
import pytest

from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.host_cache import HostCache
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.recurrent import states
from tests.patches import patched
from tests.trees import tree_of
from tests.verify.model.cpu.native.models import build, runner_of

pytestmark = pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
TEXT = np.arange(7, 307) * 13 % 97
PARENTS = np.array([-1, 0, 1, 2, 1, 0, -1, 6, 6, 8], np.int32)
TREE = tree_of([5, 9, 11, 40, 41, 42, 60, 61, 62, 63], PARENTS.tolist(), np.linspace(0.9, 0.1, 10).tolist())


@pytest.fixture(
    scope="module", params=["qwen3_5_text", "lfm2", "granitemoehybrid", "falcon_h1", "mamba2", "kimi_linear", "olmo_hybrid"]
)
def runner(request: pytest.FixtureRequest) -> NativeRunner:
    return runner_of(build(request.param))


few_tokens_between_snapshots = patched(states, SNAPSHOT_TOKENS=8)


def read(runner: NativeRunner, cache: HostCache, tokens: np.ndarray, piece: int = 512) -> np.ndarray:
    found = []
    for start in range(0, len(tokens), piece):
        part = tokens[start : start + piece]
        found.append(runner.forward(cache, ForwardBatch.chain(part)).copy())
        cache.commit(list(range(len(part))))
    return np.concatenate(found)


def test_accepted_paths_leave_the_state_of_their_text(runner: NativeRunner) -> None:
    cache, tree = runner.new_cache(), ForwardBatch.tree(7, TREE)
    read(runner, cache, TEXT[:100])
    text = list(TEXT[:100])
    for rows in ([0], [0, 1, 2, 5], [0, 7, 9], [0, 1, 6], list(range(5))):
        runner.forward(cache, tree)
        cache.commit(rows)
        text += [int(tree.tokens[row]) for row in rows]
        found = runner.forward(cache, ForwardBatch.chain(TEXT[:9])).copy()  # and drops it
        assert np.array_equal(found, read(runner, runner.new_cache(), np.array([*text, *TEXT[:9]]))[-9:])


@pytest.mark.parametrize("piece", [5, 100, 300])
def test_a_cut_text_is_read_again_from_where_its_state_is(runner: NativeRunner, piece: int) -> None:
    cache = runner.new_cache()
    whole = read(runner, cache, TEXT, piece)
    for end in (299, 250, 131, 64, 10, 3):
        cache.truncate(end)
        assert cache.length <= end
        start = cache.length
        assert np.array_equal(read(runner, cache, TEXT[start:]), whole[start:])


def test_a_text_goes_on_after_it_was_swapped(runner: NativeRunner) -> None:
    cache, other = runner.new_cache(), runner.new_cache()
    whole = read(runner, cache, TEXT, 90)
    cache.truncate(0)
    read(runner, cache, TEXT[:203], 90)
    other.fork(cache.swap_out(), 203)
    assert cache.length == 0 and other.length == 203
    assert np.array_equal(read(runner, other, TEXT[203:]), whole[203:])
