"""Predictions of steps on a GPU: bytes and launches of small models by hand, their arithmetic, and what runs first on one."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from bench import gpu_first
from bench.gpu_first import chosen_parts, run
from bench.model.counts import PARTS, Counts
from bench.model.shapes import llama
from bench.model.traffic import count_step, share_of_experts
from bench.plan import BenchError
from bench.roofline import ASSUMED, predict, stored
from tests.verify.model.families import config_of

# At this speed, a gigabyte takes a millisecond.
GIGABYTE = 1e9 * ASSUMED.kernel


def step(linear: float = 10.0) -> Counts:
    """Gigabytes of linear layers, and one of each other part; 100 launches of each."""
    sizes = dict.fromkeys(PARTS, GIGABYTE) | {"linear": linear * GIGABYTE}
    return Counts(sizes, dict.fromkeys(PARTS, 100), weight_bytes=linear * GIGABYTE, text_bytes=GIGABYTE, flops=1e9)


def test_a_step_is_the_sum_of_its_parts() -> None:
    found = predict(step(), 0, readable=1e12, flops=1e15)
    assert found["linear"] == pytest.approx(10e-3 * ASSUMED.kernel / ASSUMED.product)
    assert found["sampling"] == pytest.approx(1e-3 * (1.0 - ASSUMED.cached))
    assert found["launches"] == pytest.approx(400 * ASSUMED.launch_seconds)
    assert found["host"] == pytest.approx(0.2e-3)


HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, VOCABULARY, CONTEXT = 64, 2, 4, 2, 96, 1000, 512
HEAD_DIM = HIDDEN // HEADS
TEXT = LAYERS * 2 * CONTEXT * KV_HEADS * HEAD_DIM


@pytest.mark.slow
def test_attention_moves_the_text_the_row_and_its_parts() -> None:
    plain = count_step(llama(HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, vocab_size=VOCABULARY), 0, CONTEXT)
    parts = 2  # splits of 256 positions
    rows = 2 * (HIDDEN + 2 * KV_HEADS * HEAD_DIM)
    assert plain.bytes["attention"] == 2 * TEXT + LAYERS * (2 * rows + 2 * HEADS * parts * (HEAD_DIM + 1) * 4)
    assert plain.launches["attention"] == 3 * LAYERS


def test_weights_of_fewer_bits_are_fewer_bytes() -> None:
    found = stored(step(), 4.0)
    assert found.weight_bytes == step().weight_bytes / 4
    assert step().bytes["linear"] - found.bytes["linear"] == pytest.approx(step().weight_bytes * 3 / 4)


@pytest.mark.slow
def test_of_experts_a_share_is_read() -> None:
    config = config_of("qwen3_5_moe", "outrider")
    one, all_of_them = (count_step(config, nodes, CONTEXT) for nodes in (0, 63))
    experts = 2 * config.num_hidden_layers * 3 * config.hidden_size * config.moe_intermediate_size
    more = (share_of_experts(config, 64) - share_of_experts(config, 1)) * config.num_experts
    assert all_of_them.needed_bytes - one.needed_bytes == pytest.approx(more * experts)


def test_a_part_that_raises_is_saved_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, Any]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_first, "PARTS", {"memory": fail, "lossless": lambda: {"divergences": 0}})
    monkeypatch.setattr(gpu_first, "free_memory", lambda: None)
    run(["memory", "lossless"], tmp_path / "gpu.json")
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert saved["memory"]["error"] == "RuntimeError: out of memory" and saved["lossless"]["divergences"] == 0


def test_a_wrong_part_and_a_missing_gpu_get_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BenchError, match=r"There is no part bits5; name some of machine, "):
        chosen_parts("machine,bits5")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(BenchError, match="torch finds no GPU"):
        chosen_parts("")
