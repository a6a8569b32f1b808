"""The search finds layers that do nothing; its finding is kept, and what does not pay is not drafted."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from transformers import LlamaConfig, PreTrainedTokenizerBase

from outrider import models
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.loading import LoadOptions, load_model
from outrider.verify.model.runner import ModelRunner
from outrider.verify.self_draft import search
from outrider.verify.self_draft.loading import share_target
from outrider.verify.self_draft.search import (
    DEPTH,
    Finding,
    Measurement,
    first_sets,
    load_or_search,
    neighbours,
    own_texts,
    weights_key,
)
from outrider.verify.self_draft.session import SelfRunner
from outrider.verify.tokenizer import load_tokenizer
from tests.verify.self_draft.targets import LAYERS, layered

IDLE = (1, 2, 4)
FINDING = Finding((1, 2), (0.8, 0.7), 0.01)
PROMPTS = ([3, 4, 5], [60, 61, 62, 63, 64], [7])


@pytest.fixture(scope="module")
def target(tiny_config: LlamaConfig) -> ModelRunner:
    return layered(tiny_config, IDLE)


def test_own_texts_are_the_targets_choices(target: ModelRunner) -> None:
    texts = own_texts(target, PROMPTS)
    assert [len(text.tokens) - text.prompt_length for text in texts] == [search.TOKENS] * 3
    for text in texts:
        logits = target.read_alone(target.new_cache(), text.tokens)
        assert logits.argmax(-1)[text.prompt_length - 1 : -1].tolist() == text.tokens[text.prompt_length :].tolist()
    assert {len(text.tokens) - text.prompt_length for text in own_texts(target, PROMPTS, 0)} == {DEPTH + 1}


def test_layers_that_do_nothing_are_skipped(target: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement(target, PROMPTS)
    assert measurement.find(frozenset(IDLE)).agreement == (1, 1)
    assert measurement.find(frozenset({0, 3, 5})).agreement[0] < 0.5
    monkeypatch.setattr(measurement, "_layer_cost", 0.1)
    monkeypatch.setattr(measurement, "_row_cost", 0.01)
    found = search.search(measurement, 1e9)
    assert set(found.skipped) >= set(IDLE)
    assert measurement.speed(found) >= measurement.speed(measurement.find(frozenset(IDLE)))


def test_the_second_token_is_judged_after_the_draft_of_the_first(target: ModelRunner) -> None:
    """By the rows of one draft: the same as drafting each place by itself."""
    measurement = Measurement(target, PROMPTS)
    skipped = frozenset({2, 3})
    runner = measurement.skipper.without(skipped)
    agrees: list[list[bool]] = [[], []]
    for text in own_texts(target, PROMPTS):
        cache = text.cache
        for start in text.starts.tolist():
            cache.length = start
            logits = runner.forward(cache, ForwardBatch.chain(text.tokens[start : start + DEPTH]))
            target_rows = text.tokens[start + 1 : start + 1 + DEPTH]
            right = (logits.argmax(-1) == target_rows).tolist()
            agrees[0].append(right[0])
            if right[0]:
                agrees[1].append(right[1])
            target.forward(cache, ForwardBatch.chain(text.tokens[start : start + DEPTH]))  # the target's rows again
    expected = tuple(sum(level) / max(1, len(level)) for level in agrees)
    assert measurement.find(skipped).agreement == pytest.approx(expected)


def test_the_first_search_ends_after_one_set_without_time(target: ModelRunner, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert search.search(Measurement(target, PROMPTS), 0).skipped
    assert "measured 1 sets of layers" in caplog.text


@pytest.mark.parametrize("layers", [3, 6, 32, 80])
def test_every_set_leaves_the_first_and_the_last_layer(layers: int) -> None:
    sets = list(first_sets(layers))
    assert any(sets)
    for skipped in (*sets, *neighbours(frozenset(range(1, layers // 2)), layers)):
        assert skipped <= set(range(1, layers - 1))


def test_the_expected_speed() -> None:
    assert Finding((1,), (1.0,), 0.0).speed(4) == pytest.approx(11 / 3.5)
    assert Finding((1,), (0.5,), 0.0).speed(2) == pytest.approx(1.0)
    assert Finding((1,), (0.1, 0.9), 0.1).speed(1) < 0.6
    assert replace(FINDING, row_cost=0.2).speed(3) < FINDING.speed(3)


def test_a_finding_is_kept(
    tiny_config: LlamaConfig, target: ModelRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = cast(PreTrainedTokenizerBase, StandInTokens())
    monkeypatch.setattr(search, "Measurement", lambda *_: None)
    monkeypatch.setattr(search, "search", lambda _: FINDING)
    assert load_or_search(target, tokenizer, tmp_path / "costs") == FINDING
    file = next((tmp_path / "costs").iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(search, "Measurement", lambda *_: pytest.fail("measured again"))
        assert load_or_search(target, tokenizer, tmp_path / "costs") == FINDING
    changed = replace(FINDING, skipped=(3,))
    monkeypatch.setattr(search, "search", lambda _: changed)
    for damaged in ("{", "[]", json.dumps({"version": 0}), json.dumps({"version": search.VERSION, "skipped": 3})):
        file.write_text(damaged)
        assert load_or_search(target, tokenizer, tmp_path / "costs") == changed
    other = layered(tiny_config, (5,))
    other.model.model.norm.weight.data += 0.1
    assert weights_key(other) != weights_key(target)


class StandInTokens:
    """Encodes a text as its length."""

    def encode(self, text: str) -> list[int]:
        return [len(text), 5]


def test_what_is_not_expected_to_pay_is_not_drafted(
    target: ModelRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SelfRunner, "measure", lambda shared, _: setattr(shared, "speed_ratio", 4.0))
    with caplog.at_level(logging.INFO):
        assert not share_target(target, replace(FINDING, agreement=(0.0, 0.0))).drafts
        assert "so it drafts nothing" in caplog.text
        caplog.clear()
        assert share_target(target, replace(FINDING, agreement=(1.0, 1.0), row_cost=0.0)).drafts
        assert "skips the layers [1, 2], agrees on 100 % of the tokens" in caplog.text
    assert "drafts nothing" not in caplog.text
    assert share_target(target, range(1, LAYERS)).drafts


@pytest.mark.slow
def test_the_embedded_model_is_searched() -> None:
    target = load_model(LoadOptions(str(models.TARGET), dtype="float32", device="cpu"))
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(str(models.TARGET))
    found = load_or_search(target, tokenizer, None)
    assert 0.2 < found.agreement[0] <= 1
