"""Chains of drafts for a model whose layers keep states."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.drafters.interface import Source, chain
from outrider.verify.model.batch import ForwardBatch

pytest.importorskip("llama_cpp")
from outrider.verify.model.llama.runner import LlamaRunner
from outrider.verify.model.llama.stateful import StatefulCache
from tests.verify.model.cpu.native.files import finish

pytestmark = [pytest.mark.llama, pytest.mark.xdist_group("llama")]
VOCABULARY, ROUNDING = 512, 1e-3


def write_mamba(path: Path, hidden: int = 64, layers: int = 2, vocabulary: int = 512) -> None:
    """A Mamba, whose layers keep states, without a tokenizer."""
    inner, state, kernel, steps = 2 * hidden, 16, 4, 8
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(steps)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float | None = None) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * (scale or shape[-1] ** -0.5)).astype(np.float32)

    tensors = {
        "token_embd.weight": normal(vocabulary, hidden, scale=1.0),
        "output_norm.weight": np.ones(hidden, np.float32),
        "output.weight": normal(vocabulary, hidden, scale=0.4),
    }
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.{name}": values
            for name, values in {
                "attn_norm.weight": np.ones(hidden, np.float32),
                "ssm_in.weight": normal(2 * inner, hidden),
                "ssm_conv1d.weight": normal(inner, kernel),
                "ssm_conv1d.bias": normal(inner, scale=0.1),
                "ssm_x.weight": normal(steps + 2 * state, inner),
                "ssm_dt.weight": normal(inner, steps),
                "ssm_dt.bias": normal(inner, scale=0.5),
                "ssm_a": -np.exp(normal(inner, state, scale=0.3)),
                "ssm_d": np.ones(inner, np.float32),
                "ssm_out.weight": normal(hidden, inner),
            }.items()
        }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)


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
