"""Bytes and launches of small models, against arithmetic by hand."""

import pytest

pytest.importorskip("triton")

from bench.model.counts import Counts
from bench.model.shapes import llama
from bench.model.traffic import count_step, share_of_experts
from tests.verify.model.families import config_of

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY, CONTEXT = 64, 2, 4, 2, 96, 1000, 512
HEAD_DIM = HIDDEN // HEADS
# Of a layer: q and o, k and v, gate, up and down; and the head.
WEIGHTS = LAYERS * (2 * HIDDEN**2 + 2 * HIDDEN * KV_HEADS * HEAD_DIM + 3 * HIDDEN * FFN) + HIDDEN * VOCABULARY
TEXT = LAYERS * 2 * CONTEXT * KV_HEADS * HEAD_DIM


@pytest.fixture(scope="module")
def plain() -> Counts:
    return count_step(llama(HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, vocab_size=VOCABULARY), 0, CONTEXT)


def test_weights_and_text_are_read_once(plain: Counts) -> None:
    assert plain.needed_bytes == 2 * (WEIGHTS + TEXT)
    assert plain.flops == 2 * WEIGHTS


def test_linear_layers_also_read_and_write_their_row(plain: Counts) -> None:
    key = KV_HEADS * HEAD_DIM
    states = 2 * (2 * HIDDEN + HIDDEN + HIDDEN) + 4 * HIDDEN // 64  # two and their sums are written, one and a gain are read
    normed = 2 * HIDDEN + 4 * HIDDEN // 64
    layer = 2 * normed + 2 * (HIDDEN + 2 * key) + 2 * HIDDEN + 2 * 2 * FFN + 2 * states
    assert plain.bytes["linear"] == 2 * WEIGHTS + LAYERS * layer + normed + 2 * VOCABULARY
    assert plain.launches["linear"] == 4 * LAYERS + 1


def test_nothing_is_launched_beside_them_but_attention_and_the_embedding(plain: Counts) -> None:
    assert plain.launches["elementwise"] == 1


def test_attention_moves_the_text_the_row_and_its_parts(plain: Counts) -> None:
    parts = 2  # splits of 256 positions
    rows = 2 * (HIDDEN + 2 * KV_HEADS * HEAD_DIM)
    assert plain.bytes["attention"] == 2 * TEXT + LAYERS * (2 * rows + 2 * HEADS * parts * (HEAD_DIM + 1) * 4)
    assert plain.launches["attention"] == 3 * LAYERS


def test_rows_read_the_same_weights() -> None:
    tree = count_step(llama(HIDDEN, 1, HEADS, KV_HEADS, FFN, vocab_size=VOCABULARY), 7, CONTEXT)
    chain = count_step(llama(HIDDEN, 1, HEADS, KV_HEADS, FFN, vocab_size=VOCABULARY), 0, CONTEXT)
    assert tree.needed_bytes == chain.needed_bytes
    assert tree.flops == 8 * chain.flops


def test_of_experts_a_share_is_read() -> None:
    config = config_of("qwen3_5_moe", "outrider")
    one, all_of_them = (count_step(config, nodes, CONTEXT) for nodes in (0, 63))
    experts = 2 * config.num_hidden_layers * 3 * config.hidden_size * config.moe_intermediate_size
    more = (share_of_experts(config, 64) - share_of_experts(config, 1)) * config.num_experts
    assert all_of_them.needed_bytes - one.needed_bytes == pytest.approx(more * experts)
