"""What drafters get, what later sessions of a principal draft from, the memory's figures, and a request's draft budget."""

import os
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider import models
from outrider.drafters.interface import MAX_NODES, Drafter, Ints
from outrider.drafters.model.pair import Pair
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables import base_table, datastore, learned_text
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.drafters.tables.base_table import empty_base
from outrider.drafters.tables.learned_text import LearnedText
from outrider.drafters.tables.suffix import index
from outrider.server.settings import load_settings
from outrider.server.worker import resources, runtime
from outrider.server.worker.draft import load_draft, share_draft
from outrider.server.worker.memory_plan import MemoryPlan
from outrider.server.worker.resources import ClientCorpora, LearnedTexts, Store, Stores, Tables, load_resources
from outrider.server.worker.runtime import load, load_target, memory_figures, shared_options
from outrider.verify.cost import CostCurve
from outrider.verify.errors import ModelError
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.tokenizer import fingerprint, load_tokenizer
from tests.server.worker.fakes import tiny_runtime
from tests.verify.heads.checkpoints import save_eagle


def sizes(resources: Resources) -> list[int]:
    return [len(array) for array in resources.base]


def test_the_embedded_table_needs_the_embedded_tokenizer() -> None:
    embedded = fingerprint(load_tokenizer(str(models.TARGET)))
    ours, own = load_resources(load_settings(), Tables(lambda: embedded, 5000))
    theirs, _ = load_resources(load_settings(), Tables(lambda: "another", 5000))
    empty = [len(array) for array in empty_base()]
    assert sizes(theirs) == empty
    assert sum(sizes(ours)) > sum(empty)
    assert ours.vocabulary == 5000 and not own


@pytest.mark.parametrize("vocabulary", [0, 30, 39])
def test_a_datastore_or_table_with_ids_beyond_the_vocabulary_is_refused(tmp_path: Path, vocabulary: int) -> None:
    """The library indexes arrays of the vocabulary's size by token id without checks."""
    block = np.array([64, 3, 39, 7], np.int64)
    datastore.build(tmp_path / "d", [block], 64, "f")
    base_table.build(tmp_path / "t", [block.astype(np.uint32)], "f", 64)
    settings = {"speculation.trigram.table": str(tmp_path / "t"), "speculation.retrieval.datastores": [str(tmp_path / "d")]}
    for name, value in settings.items():
        with pytest.raises(ArrayFileError, match=r"has token ids that this model lacks; build it again"):
            load_resources(load_settings(None, {name: value}), Tables(lambda: "f", vocabulary))
    keys = load_settings(None, {"auth.keys": {"a": {"key": "secret-0123456789abcdef", "datastores": [str(tmp_path / "d")]}}})
    with pytest.raises(ArrayFileError, match="has token ids"):
        load_resources(keys, Tables(lambda: "f", vocabulary))
    shared, _ = load_resources(load_settings(None, settings), Tables(lambda: "f", 40))
    assert (len(shared.corpus), len(shared.base.tokens)) == (2, 3)


CONTEXT = Sequence(np.array([1, 2], np.int32))


def block(next_token: int) -> NDArray[np.uint32]:
    """A text of 40,000 tokens in which `next_token` follows 1 and 2."""
    return np.tile(np.array([64, 1, 2, next_token], np.uint32), 10_000)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    datastore.build(tmp_path / "store", [block(3)], 64, "f")
    return tmp_path / "store"


@pytest.fixture
def stores(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    monkeypatch.setattr(resources, "CHECK_SECONDS", 0.0)
    return Stores([Store(folder, Tables(lambda: "f", 65))])


def change(folder: Path, next_token: int, number: int, fingerprint: str = "f") -> Path:
    """Writes block number `number`, and makes it the datastore's only one."""
    path = folder / f"{number:06d}.block"
    datastore.save_block(path, block(next_token), 64, fingerprint)
    datastore.write_manifest(folder, [path.name])
    for old in folder.glob("*.block"):
        if old != path:
            old.unlink()
    return path


def next_tokens(drafter: Drafter) -> list[int]:
    tree = drafter.propose(4)
    return [int(tree.tokens[row]) for row in range(len(tree)) if tree.parents[row] < 0]


def descriptors(folder: Path) -> int:
    """The number of files in `folder` that this process has open or mapped."""
    opened = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            opened += str(folder) in os.readlink(link)
    return opened + Path("/proc/self/maps").read_text().count(str(folder))


@pytest.mark.parametrize("name", ["retrieval", "fusion"])
def test_a_changed_datastore_is_used_by_the_next_request(folder: Path, stores: Stores, name: DrafterName) -> None:
    drafter = make(name, Resources(corpus=stores, vocabulary=65))
    drafter.begin(CONTEXT)
    assert next_tokens(drafter)[0] == 3
    change(folder, 7, 1)
    other = make(name, Resources(corpus=stores, vocabulary=65))
    other.begin(CONTEXT)
    assert next_tokens(other)[0] == 7
    assert next_tokens(drafter)[0] == 3  # a request at work keeps its blocks, although their file is deleted
    drafter.end()
    drafter.begin(CONTEXT)
    assert next_tokens(drafter)[0] == 7


@pytest.mark.parametrize("name", ["retrieval", "fusion"])
def test_the_files_of_replaced_blocks_are_closed(folder: Path, stores: Stores, name: DrafterName) -> None:
    idle, working = (make(name, Resources(corpus=stores, vocabulary=65)) for _ in range(2))
    for drafter in (idle, working):
        drafter.begin(CONTEXT)
    idle.end()
    for number in range(1, 6):
        change(folder, 7, number)
        assert len(list(stores)) == 1
    assert descriptors(folder) == 2  # the current block, and the one of the request at work
    working.end()
    assert descriptors(folder) == 1
    del stores, idle, working, drafter


@pytest.mark.parametrize("damage", ["manifest", "half", "missing", "tokenizer", "vocabulary", "blocks", "empty"])
def test_a_damaged_datastore_is_logged_once_and_the_old_one_stays(
    folder: Path, stores: Stores, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    [old] = stores
    path = change(folder, 64 if damage == "vocabulary" else 7, 1, "another" if damage == "tokenizer" else "f")
    if damage == "manifest":
        (folder / datastore.MANIFEST).write_text('{"blo')
    elif damage == "half":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "missing":
        path.unlink()
    elif damage == "vocabulary":
        datastore.save_block(path, np.array([99, 98, 97], np.uint32), 99, "f")
    elif damage == "blocks":
        datastore.write_manifest(folder, [path.name, path.name])
    elif damage == "empty":
        path.write_bytes(b"")
    for _ in range(3):
        assert list(stores) == [old]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert ("restart the server to use it" if damage == "blocks" else "is not used: ") in caplog.text
    change(folder, 9, 2)
    [new] = stores
    assert new is not old


def test_only_the_request_that_begins_reads_its_corpus(tmp_path: Path) -> None:
    datastore.build(tmp_path / "d", [np.array([64, 3, 39, 7], np.int64)], 64, "f")
    (block,) = map(str, datastore.block_paths(tmp_path / "d"))
    tables = Tables(lambda: "f", 65)
    shared, _ = load_resources(load_settings(), tables)
    assert isinstance(shared.corpus, Stores)
    text = Sequence(np.array([3, 39], np.int32))
    chosen = replace(shared.corpus, chosen=ClientCorpora(tables).open(block))
    for name in ("retrieval", "fusion"):
        drafter = make(name, shared)
        drafter.begin(text, corpora=chosen)
        assert 7 in next_tokens(drafter)
        drafter.end()
        drafter.begin(text)
        assert 7 not in next_tokens(drafter)


@pytest.mark.parametrize("damage", [None, b"", b"\xff" * 64, "folder"])
def test_a_corpus_that_is_gone_is_none_and_a_damaged_one_is_logged_without_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | str | None
) -> None:
    block = tmp_path / "of-alice" / "000001.block"
    block.parent.mkdir()
    if damage == "folder":
        block.mkdir()
    elif isinstance(damage, bytes):
        block.write_bytes(damage)
    assert ClientCorpora(Tables(lambda: "f", 65)).open(str(block)).size == 0
    assert [record.levelname for record in caplog.records] == ([] if damage is None else ["WARNING"])
    assert "of-alice" not in caplog.text


VOCABULARY = 100
TEXT = np.arange(10, 60, dtype=np.int32)


def drafted(texts: LearnedTexts, principal: str, prompt: Ints) -> list[int]:
    """What fusion drafts first for a new session."""
    corpus = Stores([], learned=texts.of(principal))
    drafter = make("fusion", Resources(corpus=corpus, vocabulary=VOCABULARY))
    drafter.begin(Sequence(prompt))
    tokens: list[int] = drafter.propose(4).tokens.tolist()
    return tokens


def test_a_later_session_drafts_what_an_earlier_one_said() -> None:
    texts = LearnedTexts(1000, VOCABULARY)
    texts.of("alice").add("first", TEXT)
    assert drafted(texts, "alice", TEXT[:3])[:2] == [13, 14]
    assert not {13, 14} & set(drafted(texts, "bob", TEXT[:3]))


def tokens(text: LearnedText) -> int:
    """The number of indexed tokens, separators not counted."""
    (block,) = text.current()
    return block.size - len(text._texts) if block.size else 0


def test_the_most_recent_texts_are_kept_up_to_the_bound() -> None:
    text = LearnedText(60, VOCABULARY)
    assert tokens(text) == 0
    text.add("old", TEXT[:20])
    text.add("new", TEXT[:40])
    assert tokens(text) == 60
    text.add("newer", TEXT[:30])  # "old" is dropped, and then "new", with which it would be too much
    assert tokens(text) == 30
    text.add("long", np.tile(TEXT, 3))
    assert tokens(text) == 60


def test_a_long_text_is_not_indexed_in_the_decode_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_text, "MAX_TOKENS_IN_LOOP", 10)
    threads: list[threading.Thread] = []
    begin = threading.Event()

    def slow(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        begin.wait(60)
        return index(*arguments)

    monkeypatch.setattr(learned_text, "index", slow)
    begin.set()
    text = LearnedText(1000, VOCABULARY)
    begin.clear()
    text.add("a", TEXT)
    assert tokens(text) == 0  # it does not wait
    assert text._indexing is not None
    begin.set()
    text._indexing.result(60)
    assert tokens(text) == len(TEXT)
    assert threads[0] is threading.current_thread() and threads[1] is not threading.current_thread()


def test_a_draft_model_is_charged_to_its_own_device(
    tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The target's plan holds for a draft model on its device; on another one, what that holds."""
    plan = MemoryPlan(4, 100_000, caches=4, pages=1000)
    assert runtime.plan_draft(tiny_runner, None, plan) == plan
    assert runtime.plan_draft(tiny_runner, tiny_runner, plan) == plan
    target = cast(Any, SimpleNamespace(cache_shape=replace(tiny_runner.cache_shape, device=torch.device("cuda", 0))))
    monkeypatch.setattr(tiny_runner, "model_tokens", 200_000)
    row = tiny_runner.cache_shape.bytes_for(1)
    for tokens, context in ((1_000_000, 100_000), (50_000, 38_912)):
        monkeypatch.setattr(runtime, "free_bytes", lambda _, tokens=tokens: tokens * row)
        assert runtime.plan_draft(target, tiny_runner, plan).context_tokens == context
    assert [record.message.partition(", so")[0] for record in caplog.records] == [
        "The memory of cpu holds the draft model's KV cache for 38912 tokens"
    ]
    monkeypatch.setattr(runtime, "free_bytes", lambda _: 100 * row)
    with pytest.raises(ModelError, match=r"of the memory of cpu are free .* serve a smaller or quantised model\.$"):
        runtime.plan_draft(target, tiny_runner, plan)


def test_a_head_makes_the_target_keep_its_hidden_states(tmp_path: Path) -> None:
    settings = load_settings(None, {"draft_model.path": str(save_eagle(tmp_path, target_size=256)), "model.device": "cpu"})
    target = load_target(settings)
    before = memory_figures(target, None)[0].slot_bytes
    options, tokenizer = shared_options(settings, settings.draft_model), load_tokenizer(str(models.TARGET))
    head, differences = load_draft(settings, options, tokenizer, target)
    assert isinstance(head, HeadModel)
    kept = target.new_cache().hidden
    assert kept is not None
    states = kept.capacity * 256 * target.cache_shape.dtype.itemsize
    assert memory_figures(target, None)[0].slot_bytes == before + states < memory_figures(target, head)[0].slot_bytes
    assert isinstance(share_draft(head, differences, target, 2, Pair(1.0, 0.1)), HeadRunner)


def test_what_a_busy_start_has_timed_is_timed_again_in_pauses(tmp_path: Path) -> None:
    flags = {"draft_model.path": str(models.DRAFT), "model.device": "cpu", "speculation.cost_folder": str(tmp_path)}
    for first in (True, False):  # also what an earlier start has saved
        made = load(load_settings(None, flags))
        pair, curve = made.resources.pair, made.curve
        assert curve is not None and curve.is_estimated == first
        pair.draft_seconds, curve.seconds = 60.0, curve.seconds + 60 * first
        while made.timings:  # each correction is a fifth at least
            made.measure_again()
        assert pair.draft_seconds < 60 and float(curve.at(0)[0]) < 60
        made.save_findings()


def test_the_budget_of_a_request(tiny_runner: TorchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tiny_runtime(tiny_runner, load_settings())
    made.curve = CostCurve((0, MAX_NODES), (1,), ((0.1, 0.2),))
    assert made.budget(7) == (7, None)
    assert made.budget("auto") == (MAX_NODES, made.curve)
    monkeypatch.setattr(TorchRunner, "draft_nodes", 71)
    assert made.budget(MAX_NODES) == (71, None)
    assert made.budget(7) == (7, None)
    assert made.resources_of("anyone") is made.resources


def test_a_keys_datastore_is_used_only_for_its_requests(tmp_path: Path) -> None:
    from outrider.server.datastore_builder import build_suffix

    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 20)
    build_suffix([tmp_path / "text.txt"], tmp_path / "store", str(models.TARGET))
    flags = {
        "auth.keys": {"one": {"key": "long-enough", "datastores": [str(tmp_path / "store")]}, "two": "long-enough-too"},
        "speculation.max_nodes": 4,
    }
    made = load(load_settings(None, flags))
    assert [len(made.resources_of(name).corpus) for name in ("one", "two")] == [2, 1]  # one of them is a request's choice
    assert made.curve is None


def test_each_principal_learns_from_its_own_sessions(tiny_runner: TorchRunner) -> None:
    settings = load_settings(None, {"sessions.learn": "key"})
    shared, own = load_resources(settings, Tables(lambda: "f", 100))
    made = replace(tiny_runtime(tiny_runner, settings), resources=shared, own_resources=own, learned=LearnedTexts(100, 100))
    made.learn("one", "session", np.arange(9, dtype=np.int32))
    sizes = {name: [block.size for block in made.resources_of(name).corpus] for name in ("one", "two")}
    assert sizes == {"one": [0, 10], "two": [0, 0]}
    assert len(shared.corpus) == 2  # drafters have room for the same number of blocks
