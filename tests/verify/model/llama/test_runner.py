"""Forwards by llama.cpp of the real model's file: trees, commits, forks, swaps, and the room that sessions share."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.models import packaged
from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.model.batch import ForwardBatch, Segment
from outrider.verify.model.cache import kv_cache
from tests.hub import installed
from tests.trees import tree_of

pytest.importorskip("llama_cpp")
from outrider.verify.model.llama import library
from outrider.verify.model.llama.library import LlamaModel
from outrider.verify.model.llama.runner import LlamaCache, LlamaRunner

pytestmark = [pytest.mark.llama, pytest.mark.xdist_group("llama")]
CONTEXT = 1024
# Logits spread over some 25 units. Forwards of other sizes add in another order, with activations rounded to 8 bits.
ROUNDING = 2.0


@pytest.fixture(scope="module")
def runner() -> Iterator[LlamaRunner]:
    found = LlamaRunner(installed(), CONTEXT, on_gpu=False)
    found.threads = 1
    found.start(CONTEXT)
    yield found


@pytest.fixture
def cache(runner: LlamaRunner) -> Iterator[LlamaCache]:
    found = runner.new_cache()
    assert isinstance(found, LlamaCache)
    yield found


def words(count: int, seed: int = 0) -> list[int]:
    return Random(seed).choices(range(1000, 40000), k=count)


def read(runner: LlamaRunner, cache: LlamaCache, tokens: list[int]) -> None:
    runner.forward(cache, ForwardBatch.chain(tokens), logits=False)
    cache.length += len(tokens)


def step(runner: LlamaRunner, cache: LlamaCache, token: int) -> Any:
    """The logits after one more token, which is committed."""
    logits = runner.forward(cache, ForwardBatch.chain([token]))[0].copy()
    cache.commit([0])
    return logits


def after(runner: LlamaRunner, text: list[int]) -> Any:
    """The logits after a text that is read token by token."""
    cache = runner.new_cache()
    assert isinstance(cache, LlamaCache)
    return [step(runner, cache, token) for token in text][-1]


def same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    return float(np.abs(found - expected).max()) < ROUNDING


def test_every_node_of_a_tree_has_the_logits_of_its_path(runner: LlamaRunner, cache: LlamaCache) -> None:
    prompt, root, nodes = words(5), words(1, seed=1)[0], words(40, seed=2)
    random = Random(3)
    parents = [-1, *(random.randrange(-1, node) for node in range(1, len(nodes)))]
    read(runner, cache, prompt)
    logits = runner.forward(cache, ForwardBatch.tree(root, tree_of(nodes, parents))).copy()
    for node in range(0, len(nodes), 7):
        path, place = [], node
        while place >= 0:
            path.append(nodes[place])
            place = parents[place]
        assert same(logits[node + 1], after(runner, [*prompt, root, *reversed(path)])), node


@pytest.mark.parametrize(("rows", "path"), [([0], []), ([0, 1, 2], [0, 1]), ([0, 3, 4], [2, 3]), ([0, 3], [2])])
def test_what_is_committed_is_the_text(runner: LlamaRunner, cache: LlamaCache, rows: list[int], path: list[int]) -> None:
    prompt, root, nodes, last = words(5), words(1, seed=1)[0], words(4, seed=2), words(1, seed=4)[0]
    read(runner, cache, prompt)
    runner.forward(cache, ForwardBatch.tree(root, tree_of(nodes, [-1, 0, -1, 2])))
    cache.commit(rows)
    text = [*prompt, root, *(nodes[node] for node in path)]
    assert cache.length == len(text)
    assert same(step(runner, cache, last), after(runner, [*text, last]))


def test_what_is_not_committed_leaves_nothing(runner: LlamaRunner, cache: LlamaCache) -> None:
    prompt, last = words(5), words(1, seed=4)[0]
    read(runner, cache, prompt)
    for _ in range(3):
        runner.forward(cache, ForwardBatch.tree(words(1)[0], tree_of(words(6), [-1, -1, 0, 0, 1, 1])))
    assert same(step(runner, cache, last), after(runner, [*prompt, last]))
    step(runner, cache, last)
    cache.truncate(len(prompt))
    assert same(step(runner, cache, last), after(runner, [*prompt, last]))


def test_streams_in_one_forward_do_not_see_each_other(runner: LlamaRunner, cache: LlamaCache) -> None:
    other = runner.new_cache()
    assert isinstance(other, LlamaCache)
    root = words(1, seed=1)[0]
    drafted = tree_of(words(4, seed=2), [-1, -1, 0, 1])
    for each, seed in ((cache, 5), (other, 6)):
        read(runner, each, words(9, seed))
    batch = ForwardBatch.tree(root, drafted)
    found = [logits.copy() for logits in runner.forward_all([Segment(cache, batch), Segment(other, batch)])]
    for logits, seed in zip(found, (5, 6), strict=True):
        assert same(logits[4], after(runner, [*words(9, seed), root, int(drafted.tokens[1]), int(drafted.tokens[3])]))


@pytest.mark.parametrize("length", [3, 300, kv_cache.PAGE_TOKENS])
def test_a_fork_and_a_swapped_out_session_go_on(runner: LlamaRunner, cache: LlamaCache, length: int) -> None:
    text, last = words(length), words(1, seed=4)[0]
    read(runner, cache, text)
    expected = step(runner, cache, last)
    cache.truncate(length)
    forked = runner.new_cache()
    forked.fork(cache, length)
    assert forked.length == length and same(step(runner, forked, last), expected)  # type: ignore[arg-type]
    rows = cache.swap_out()
    assert (cache.length, rows.length) == (0, length)
    cache.fork(rows, length)
    assert cache.length == length and same(step(runner, cache, last), expected)


def test_sequences_and_pages_are_given_back(runner: LlamaRunner, cache: LlamaCache) -> None:
    free, nodes = runner.free_pages, runner.draft_nodes
    other = runner.new_cache()
    assert isinstance(other, LlamaCache) and runner.draft_nodes <= nodes
    read(runner, other, words(300))
    assert free is not None and runner.free_pages == free - 2
    for _ in range(4):  # more leaves than there are sequences
        runner.forward(other, ForwardBatch.tree(1, tree_of(words(100), [-1] * 100)))
        other.commit([0, 7])
    assert other.length == 308
    del other
    assert (runner.free_pages, runner.draft_nodes) == (free, nodes)


def test_an_8_bit_cache(runner: LlamaRunner) -> None:
    small = LlamaRunner(packaged.place(packaged.SMOLLM2), CONTEXT, "int8", on_gpu=False)
    small.start(CONTEXT)
    assert small.dtypes == ("float32", "int8")
    assert small.cache_shape.bytes_for(1) < 0.6 * runner.cache_shape.bytes_for(1)
    assert same(after(small, words(20)), after(runner, words(20)))


def test_a_cache_of_fp8_is_refused() -> None:
    with pytest.raises(ModelError, match=r"model\.kv_dtype is fp8, which llama\.cpp's cache does not have"):
        LlamaRunner(packaged.place(packaged.SMOLLM2), kv_dtype="fp8")


def test_as_many_layers_are_on_the_gpu_as_it_has_memory_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a build for a GPU whose memory holds half of the 30 layers."""
    api, tried = llama_package.library(), list[int]()
    load = api.llama_model_load_from_file

    def load_half(path: bytes, parameters: Any) -> Any:
        tried.append(parameters.n_gpu_layers)
        return load(path, parameters) if parameters.n_gpu_layers <= 15 else None

    monkeypatch.setattr(api, "llama_supports_gpu_offload", lambda: True)
    monkeypatch.setattr(api, "llama_model_load_from_file", load_half)
    LlamaModel(packaged.place(packaged.SMOLLM2), on_gpu=True)
    assert tried == [library.ALL_LAYERS, 22, 15]
    assert "15 of 30 layers are on the GPU, which has no memory for more" in caplog.text


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load"):
        LlamaRunner(file)


def test_a_model_whose_layers_keep_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "keeps_states", True)
    with pytest.raises(ModelError, match=r"keep states, from which llama\.cpp takes no draft back; set model\.backend"):
        LlamaRunner(installed(), CONTEXT, on_gpu=False)
