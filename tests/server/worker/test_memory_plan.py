"""What starts on a device with stated memory: fewer KV caches, then shorter ones, then a refusal; and what activations take."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.settings import load_settings
from outrider.server.settings.tree import DEFAULT_MAX_ACTIVE
from outrider.server.worker import activations
from outrider.server.worker.activations import MARGIN, Activations
from outrider.server.worker.memory_plan import MIN_CONTEXT_TOKENS, MemoryFigures, MemoryWishes, plan_memory
from outrider.server.worker.runtime import load_activations
from outrider.verify.errors import ModelError
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS, PAGE_TOKENS
from outrider.verify.model.torch_runner import TorchRunner

CUDA_BYTES = 600_000_000  # of a device, for CUDA itself
# Bytes of weights in bfloat16 and with 4 bits, and of one position: 2 x layers x KV heads x head dimension x 2 bytes.
WEIGHTS = {"8B": (16_380_000_000, 6_000_000_000), "14B": (29_540_000_000, 10_000_000_000)}
TOKEN_BYTES = {"8B": 2 * 36 * 8 * 128 * 2, "14B": 2 * 40 * 8 * 128 * 2}
CONTEXT = 40960


def qwen3(size: str, gib: int, quantised: bool = False) -> MemoryFigures:
    """The figures of a Qwen3 on a card of this many GiB."""
    free = (gib << 30) - CUDA_BYTES - WEIGHTS[size][quantised]
    return MemoryFigures(free, TOKEN_BYTES[size], CONTEXT)


CARDS = [("8B", 24, False, 1, CONTEXT), ("8B", 24, True, 2, CONTEXT), ("14B", 80, False, 6, CONTEXT)]
CARDS += [("14B", 16, True, 1, 31744), ("8B", 18, False, 1, 12288)]


@pytest.mark.parametrize(("size", "gib", "quantised", "slots", "context_tokens"), CARDS)
def test_qwen3_starts_by_itself(size: str, gib: int, quantised: bool, slots: int, context_tokens: int) -> None:
    plan = plan_memory(qwen3(size, gib, quantised), MemoryWishes())
    assert (plan.slots, plan.context_tokens) == (slots, context_tokens)
    assert (plan.note is None) == (context_tokens == CONTEXT)  # requests share the pages
    assert plan.streams == 8 + DEFAULT_MAX_ACTIVE
    if plan.note is not None:
        assert "model.context_tokens" in plan.note and f"{context_tokens} tokens" in plan.note
        assert plan.note.endswith(".") and "\n" not in plan.note


@pytest.mark.parametrize(
    ("size", "gib", "quantised"), [("8B", 16, False), ("14B", 16, False), ("14B", 24, False), ("14B", 11, True)]
)
def test_qwen3_is_refused_with_the_figures(size: str, gib: int, quantised: bool) -> None:
    with pytest.raises(ModelError, match=r"^1 KV cache of 8192 tokens would need 1\.\d GB, but \d+\.\d [GM]B .* model\.$"):
        plan_memory(qwen3(size, gib, quantised), MemoryWishes())


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        (MemoryWishes(slots=8, max_active=2), "8 KV caches of 8192 tokens would need .*lower sessions.slots, or"),
        (MemoryWishes(context_tokens=40960, slots=2), "lower model.context_tokens or sessions.slots, or"),
        (MemoryWishes(context_tokens=40961), "at most 40960 tokens"),
        (MemoryWishes(slots=2, max_active=4), "scheduling.max_active is 4, but sessions.slots allows only 2 KV caches"),
    ],
)
def test_settings_that_cannot_be_respected_are_refused(wishes: MemoryWishes, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        plan_memory(qwen3("8B", 24), wishes)


wished = st.none() | st.integers(1, 12)


@given(
    st.builds(
        MemoryFigures,
        st.integers(-1 << 36, 1 << 38),
        st.integers(0, 1 << 20),
        st.integers(16, 1 << 18),
        slot_bytes=st.just(0) | st.integers(1, 1 << 32),
    ).filter(lambda figures: figures.cache_bytes(1) > 0),
    st.builds(MemoryWishes, st.none() | st.integers(16, 1 << 18), wished, wished, st.integers(0, 100)),
)
def test_a_plan_fits_and_respects_the_settings(figures: MemoryFigures, wishes: MemoryWishes) -> None:
    try:
        plan = plan_memory(figures, wishes)
    except ModelError as error:
        assert re.fullmatch(r"[^\n]+\.", str(error))
        return
    assert plan.slots * figures.cache_bytes(plan.context_tokens) <= figures.budget_bytes
    assert plan.context_tokens == wishes.context_tokens or wishes.context_tokens is None
    assert plan.context_tokens >= min(MIN_CONTEXT_TOKENS, wishes.context_tokens or figures.model_tokens)
    assert plan.slots == wishes.slots or (wishes.slots is None and plan.slots >= 1)
    assert plan.pages is not None
    assert plan.pages * figures.token_bytes * PAGE_TOKENS + plan.streams * figures.slot_bytes <= figures.budget_bytes
    assert plan.pages * PAGE_TOKENS >= plan.slots * (plan.context_tokens + MARGIN_POSITIONS)
    assert plan.slots <= plan.streams <= max(plan.slots, wishes.caches)
    assert plan.streams == max(plan.slots, wishes.caches) or figures.slot_bytes


def test_layers_with_a_window_are_planned_with_the_rows_that_are_left() -> None:
    """Five of six layers with a window of 512: a context of 128k tokens takes a third of the memory."""
    figures = MemoryFigures(1_300_000_000, 12_000, 131_072, is_lazy=True)
    windowed = replace(figures, windowed=[(512, 10_000)])
    assert plan_memory(figures, MemoryWishes()).context_tokens == 86_016
    plan = plan_memory(windowed, MemoryWishes())
    assert (plan.slots, plan.context_tokens) == (2, 131_072)
    assert windowed.cache_bytes(4096) == figures.cache_bytes(4096)
    assert windowed.cache_bytes(131_072) < 0.4 * figures.cache_bytes(131_072)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The most bytes in use by device."""
    found = {"cuda:0": 5000, "cuda:1": 7000}
    monkeypatch.setattr(activations, "peak_bytes", lambda device, restarts=False: found[device])
    return found


def test_the_most_is_kept_for_the_next_start(used: dict[str, int], tmp_path: Path) -> None:
    devices: dict[str, Any] = {name: name for name in used}
    first = Activations(devices, tmp_path / "file.json")
    assert first.reserved("cuda:0") is None
    for beyond in (900, 400):
        used["cuda:0"] = 5000 + 2000 + beyond
        first.observe({"cuda:0": 2000, "cuda:1": 2000})
    later = Activations(devices, tmp_path / "file.json")
    assert later.reserved("cuda:0") == MARGIN * 900
    assert later.reserved("cuda:1") is None  # nothing beyond its caches


@pytest.mark.parametrize("content", ["", "[]", '{"cuda:0": "x"}', '{"cuda:0": -1}'])
def test_a_file_that_is_none(content: str, used: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    assert Activations({"cuda:0": "cuda:0"}, tmp_path / "file.json").reserved("cuda:0") is None


def test_pages_in_the_hosts_memory_are_not_watched(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of llama.cpp on a CPU: PyTorch, which is not imported there, knows nothing of them."""
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    assert load_activations(tiny_runner, load_settings(None, {})).reserved("cpu") is None


def test_the_plan_leaves_what_was_measured_but_at_most_the_share() -> None:
    figures = {reserved: MemoryFigures(1000, 1, 100, reserved_bytes=reserved).budget_bytes for reserved in (None, 50, 500)}
    assert figures == {None: 800, 50: 950, 500: 800}
