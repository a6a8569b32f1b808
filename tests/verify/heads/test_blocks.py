"""Block heads: drafts in each published layout, sessions' contexts, lossless answers, and what cannot be loaded."""

import json
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from outrider.drafters.options import DrafterName
from outrider.verify.errors import ModelError
from outrider.verify.heads.block_model import BlockModel
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadRunner
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.load_options import Backend, LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier
from tests.decoding import verify
from tests.slow import mostly_slow
from tests.verify.draft_model.test_draft_model import count_rows
from tests.verify.heads.block_layouts import LAYOUTS, ROWS, drafts, save_block
from tests.verify.heads.checkpoints import save_target
from tests.verify.heads.sessions import TEXT, begin, check_answers, check_chain_at_once, drafted, load_started

Pair = tuple[ModelRunner, BlockModel]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("blocks")
    save_target(path / "target")
    return path


@pytest.fixture(scope="module")
def load(folder: Path) -> Callable[..., Pair]:
    def load(name: str, backend: Backend = "auto", states: int = 2048) -> Pair:
        save_block(folder / name, LAYOUTS[name])
        return load_started(folder / "target", folder / name, states, backend=backend)

    return load


def begun(target: ModelRunner, head: BlockModel) -> tuple[Verifier, Any]:
    """Sessions of both that have read a text."""
    session = HeadRunner(head).session()
    return begin(target, session), session


def expected(folder: Path, name: str, text: list[int]) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)
    return drafts(LAYOUTS[name], load_file(folder / name / "model.safetensors"), model, text)


@pytest.mark.parametrize("backend", mostly_slow(["auto", "torch"], "auto"))
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_those_of_the_layout(folder: Path, load: Callable[..., Pair], name: str, backend: Backend) -> None:
    """Also after tokens whose states the target computed later on."""
    verifier, session = begun(*load(name, backend))
    found = drafted(session, ROWS)
    assert len(found) == ROWS - (not LAYOUTS[name].from_anchor)
    assert found == expected(folder, name, TEXT.tolist())
    for _ in range(3):
        verdict = verify(verifier)
        verifier.commit(verdict)
        session.advance(verdict.tokens)
    assert drafted(session, ROWS) == expected(folder, name, verifier.sequence.tokens.tolist())


def test_pages_hold_the_context_as_other_caches_do(
    folder: Path, load: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TorchRunner, "in_pages", True)
    head = load("rnn", "torch")[1]
    monkeypatch.undo()
    target, _ = load("rnn", "torch")
    assert drafted(begun(target, head)[1], ROWS) == expected(folder, "rnn", TEXT.tolist())


def test_states_that_were_not_kept_are_left_out(load: Callable[..., Pair]) -> None:
    target, head = load("speculators dflash", states=24)
    _, short = begun(target, head)
    _, whole = begun(*load("speculators dflash"))
    assert len(drafted(short, ROWS)) == ROWS - 1
    assert not np.allclose(short.root(2).probability, whole.root(2).probability, atol=1e-3)


def test_a_draft_reads_new_tokens_only_and_goes_on_below_accepted_ones(
    load: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, head = load("speculators dspark")
    verifier, session = begun(target, head)
    rows = count_rows(monkeypatch, head)
    first = drafted(session, ROWS)
    assert sum(rows) == len(TEXT)
    session.advance(np.array(first[:2], np.int32))  # as if the target had accepted them
    again = session.expand([first[3]], [1], 2) if session.expand([first[2]], [0], 2).tokens[0, 0] == first[3] else None
    assert again is not None and int(again.tokens[0, 0]) == first[4]
    session.begin(verifier.sequence)
    rows.clear()
    verdict = verify(verifier)
    verifier.commit(verdict)
    session.advance(verdict.tokens)
    drafted(session, ROWS)
    assert rows == [2]


CASES = [*product(["dflash"], ["draft", "fusion", "pearl"]), *product(["dflash 2", "rnn"], ["draft-tree"])]


@pytest.mark.parametrize(("name", "drafter"), mostly_slow(CASES, ("dflash", "fusion"), ("rnn", "draft-tree")))
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 0.8], 0.8))
def test_answers_equal_plain_decoding(load: Callable[..., Pair], name: str, drafter: DrafterName, temperature: float) -> None:
    target, head = load(name)
    check_answers(target, HeadRunner(head), drafter, temperature)


@pytest.mark.parametrize("name", ["dflash", "gated", "rnn"])
def test_a_chain_at_once_is_drafted_as_one_by_one(load: Callable[..., Pair], name: str) -> None:
    check_chain_at_once(begun(*load(name))[1])


def test_the_price_of_a_block_grows_with_the_text(load: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = load("dflash")
    now, forwards = [0.0], {each: each.forward for each in (target, head)}

    def take(runner: Any, cache: Any, *others: Any) -> Any:
        now[0] += 1e-3 + 1e-5 * cache.length
        return forwards[runner](cache, *others)

    for each in forwards:
        monkeypatch.setattr(each, "forward", partial(take, each))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    shared = HeadRunner(head)
    shared.measure(target)
    assert shared.pair.forward_seconds(10_000) == pytest.approx(1e-3 + 0.1, rel=0.1)


def test_rejection_sampling_draws_from_the_blocks_distribution(load: Callable[..., Pair]) -> None:
    """Each drafted token comes with the distribution of its own position."""
    target, head = load("speculators dspark")
    verifier, session = begun(target, head)
    session.begin(verifier.sequence, SamplingParams(1.0, seed=3, rule="rejection"))
    found = session.root(1)
    assert found.q is not None and found.q[0].sum() == pytest.approx(1, abs=1e-4)
    assert found.q[0, found.tokens[0, 0]] > 0


def test_the_confidence_head_says_how_sure_a_token_is(load: Callable[..., Pair], folder: Path) -> None:
    _, session = begun(*load("speculators dspark"))
    weights = load_file(folder / "speculators dspark" / "model.safetensors")
    weights["confidence_head.proj.bias"] += 50
    save_file(weights, folder / "speculators dspark" / "model.safetensors")
    assert session.root(1).probability[0, 0] < 0.999
    sure = load_started(folder / "target", folder / "speculators dspark")
    assert begun(*sure)[1].root(1).probability[0, 0] == pytest.approx(1)


def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    target = load_weights(LoadOptions(str(folder / "target"), dtype="float32", device="cpu"))

    def refuse(name: str, **changed: Any) -> str:
        if changed:
            save_block(tmp_path, LAYOUTS[name], **changed)
        with pytest.raises(ModelError) as refused:
            load_head(str(tmp_path), target)
        return str(refused.value)

    reads = {"aux_hidden_state_layer_ids": [1, 6]}
    assert "reads the inputs of layers 1, 6, and this target has 6 layers" in refuse("speculators dflash", **reads)
    assert "blocks of 500 rows" in refuse("speculators dflash", block_size=500)
    assert "3 times 32" in refuse("speculators dflash", aux_hidden_state_layer_ids=[1, 2, 4])
    assert "cannot be loaded (KeyError: 'mask_token_id')" in refuse("dflash", dflash_config={})
    weights = save_block(tmp_path, LAYOUTS["rnn"])
    save_file(weights | {"d2t": weights["d2t"] - 500}, tmp_path / "model.safetensors")
    assert "drafts tokens that the target does not have" in refuse("rnn")
    del weights["markov_head.joint_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    assert "markov_head.joint_proj.weight is missing" in refuse("rnn")
    (tmp_path / "model.safetensors").unlink()
    assert "There are no weights of a head" in refuse("rnn")
    assert json.loads((tmp_path / "config.json").read_text())["speculators_model_type"] == "dspark"
