"""Requests to an encoder whose process is a stand-in; which models are encoders; and no code of an encoder's folder runs."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider import models
from outrider.models import packaged
from outrider.server.encoders import service
from outrider.server.encoders.kind import Kind, kind_of
from outrider.server.encoders.messages import Embed, Failed, Load, Loaded, Score, Scores, Vectors, decode_request, encode
from outrider.server.encoders.service import (
    CHARACTERS,
    PART_CHARACTERS,
    PART_TEXTS,
    TEXTS,
    EncoderFailed,
    EncoderService,
    Part,
    Turns,
    characters,
    divide,
)
from outrider.server.engine.engine import Overloaded, ShuttingDown, WorkerLost
from outrider.server.engine.helper import HelperEnded
from outrider.server.http.errors import APIError
from outrider.server.settings import load_settings
from outrider.server.telemetry.metrics import EncoderMetrics
from tests.server.encoders.encoders import save_all


@pytest.fixture
def few_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_WAITING_TOKENS", 10)


class Program:
    """The process: fails for texts that contain "bad", ends at "fatal", and waits at "slow" until it is released."""

    def __init__(self) -> None:
        self.alive = False
        self.starts = 0
        self.batches: list[list[str]] = []
        self.released = asyncio.Event()

    async def ask(self, message: bytes, seconds: float = 0.0) -> bytes:
        request = decode_request(message)
        if isinstance(request, Load):
            self.alive, self.starts = True, self.starts + 1
            return encode(Loaded(1, 9))
        assert self.alive
        if isinstance(request, Score):
            return encode(Scores([0.0] * len(request.pairs), [len(query) + len(document) for query, document in request.pairs]))
        assert isinstance(request, Embed)
        self.batches.append(request.texts)
        if "slow" in request.texts:
            await self.released.wait()
        if "fatal" in request.texts:
            self.alive = False
            raise HelperEnded
        if "bad" in request.texts:
            return encode(Failed("no"))
        values = b"".join(text[:4].ljust(4).encode() for text in request.texts)
        return encode(Vectors(values, [len(text) for text in request.texts]))

    async def close(self) -> None:
        self.alive = False


@asynccontextmanager
async def running(overrides: Mapping[str, Any] | None = None) -> AsyncIterator[tuple[EncoderService, Program]]:
    service, program = EncoderService(load_settings(None, overrides), "embeddings", EncoderMetrics()), Program()
    service._helper = program  # type: ignore[assignment]
    await service.start()
    async with asyncio.timeout(10):
        yield service, program
    await service.stop()


async def settled() -> None:
    """Returns once all tasks wait for the process."""
    for _ in range(20):
        await asyncio.sleep(0)


def embed(service: EncoderService, principal: str, *texts: str) -> asyncio.Task[tuple[bytes, list[int]]]:
    return asyncio.create_task(service.embed(principal, texts, None, None))


async def test_waiting_requests_are_encoded_together() -> None:
    async with running() as (service, program):
        first = embed(service, "a", "slow")
        await settled()
        others = [embed(service, principal, principal) for principal in "bcd"]
        await settled()
        program.released.set()
        assert await first == (b"slow", [4])
        assert [await other for other in others] == [(b"b   ", [1]), (b"c   ", [1]), (b"d   ", [1])]
        assert program.batches == [["slow"], ["b", "c", "d"]]


@pytest.mark.parametrize(("text", "error"), [("bad", EncoderFailed), ("fatal", WorkerLost)])
async def test_texts_that_fail_do_not_fail_other_requests(text: str, error: type[Exception]) -> None:
    async with running() as (service, program):
        first = embed(service, "a", "slow")
        await settled()
        failing, other = embed(service, "b", text), embed(service, "c", "good")
        await settled()
        program.released.set()
        await first
        with pytest.raises(error):
            await failing
        assert await other == (b"good", [4])
        assert await embed(service, "a", "more") == (b"more", [4])


async def test_a_client_that_leaves_is_not_encoded() -> None:
    async with running() as (service, program):
        first = embed(service, "a", "slow")
        await settled()
        left = embed(service, "b", "b")
        await settled()
        left.cancel()
        await settled()
        program.released.set()
        await first
        assert await embed(service, "c", "c") == (b"c   ", [1])
        assert ["b"] not in program.batches


async def test_what_waits_is_bounded_and_shared(few_characters: None) -> None:
    async with running({"scheduling.max_waiting": 2}) as (service, program):
        first = embed(service, "a", "slow")
        waiting = [embed(service, "a", "a") for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await embed(service, "a", "a")
        waiting.append(embed(service, "b", "b" * 40))  # nothing of it waits yet, and it takes all characters
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await embed(service, "b", "b")
        waiting.append(embed(service, "c", "c"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await embed(service, "a", "a")
        program.released.set()
        assert [(await each)[1] for each in (first, *waiting)] == [[4], [1], [1], [40], [1]]
        assert await embed(service, "a", "x" * 40) == (b"xxxx", [40])  # nothing is held any more


async def test_texts_are_cut_before_they_are_paired_and_tokenized() -> None:
    async with running() as (service, _):
        assert (await embed(service, "a", "x" * 8_000_000, "x" * 144))[1] == [144, 144]  # 9 tokens of 16 characters
        service.kind = "rerank"
        assert (await service.score("a", "q" * 4_000_000, ["d" * 1_000_000, "d"] * 1000))[1] == [288, 145] * 1000


async def test_shutting_down_fails_what_runs_and_what_waits() -> None:
    async with running() as (service, _):
        first = embed(service, "a", "slow")
        await settled()
        waiting = embed(service, "b", "b")
        await settled()
        service.abort()
        for each in (first, waiting, embed(service, "c", "c")):
            with pytest.raises(ShuttingDown):
                await each


async def test_more_than_the_bound_is_refused_also_when_nothing_waits(few_characters: None) -> None:
    async with running() as (service, program):
        with pytest.raises(APIError, match="have 41 characters, and 40 are allowed in a request; send fewer texts") as raised:
            await embed(service, "a", "x" * 20, "x" * 21)
        assert raised.value.status_code == 400 and not program.batches
        assert (await embed(service, "b", "x" * 40))[1] == [40]


REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, PART_TEXTS), st.sampled_from([None, 1]), st.booleans()))


@given(REQUESTS)
async def test_each_part_is_taken_once_in_the_order_of_its_principal(
    requests: Sequence[tuple[str, int, int | None, bool]],
) -> None:
    turns = Turns()
    added: dict[str, list[Part]] = {}
    for principal, count, options, has_left in requests:
        part = Part(["text"] * count, options)
        turns.add(principal, part)
        if has_left:
            part.answer.cancel()
        else:
            added.setdefault(principal, []).append(part)
    taken: list[Part] = []
    while parts := turns.take():
        assert len({part.options for part in parts}) == 1 and sum(len(part.texts) for part in parts) <= TEXTS
        taken += parts
    for principal, parts in added.items():
        assert [part for part in taken if part in parts] == parts, principal
    assert len(taken) == sum(map(len, added.values()))


@given(st.lists(st.sampled_from(["a", "b" * 100, "c" * (PART_CHARACTERS // 2), "d" * (CHARACTERS + 1)]), max_size=40))
async def test_parts_are_bounded_in_texts_and_characters(texts: Sequence[str]) -> None:
    turns, parts = Turns(), divide(texts, None)
    assert [text for part in parts for text in part.texts] == list(texts)
    for part in parts:
        assert len(part.texts) <= PART_TEXTS and (len(part.texts) == 1 or characters(part.texts) <= PART_CHARACTERS)
        turns.add("a", part)
    while taken := turns.take():
        assert len(taken) == 1 or sum(characters(part.texts) for part in taken) <= CHARACTERS


MODULES = "sentence_transformers.sentence_transformer.modules."
ROUTER = "sentence_transformers.base.modules.router.Router"
CODE = "import pathlib\npathlib.Path(__file__).with_name('ran').write_text('')\nfrom {} import {} as Evil\n"


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def load(request: Load) -> Any:
    from outrider.server.encoders import encoder  # takes seconds

    return encoder.load(request)


def module(type_name: Any, path: str = "part") -> list[dict[str, Any]]:
    return [{"idx": 0, "name": "0", "path": path, "type": type_name}]


def router(type_name: str, part: str = "0") -> dict[str, Any]:
    return {"types": {part: type_name}, "structure": {"query": [part]}, "parameters": {"default_route": "query"}}


HOSTILE: dict[str, dict[str, Any]] = {
    "a module": {"modules.json": module("evil.Evil", "")},
    "a repository": {"modules.json": module("x/y--evil.Evil")},
    "a route": {"modules.json": module(ROUTER), "part/router_config.json": router("evil.Evil")},
    "a route of an earlier version": {"modules.json": module(ROUTER, ""), "config.json": router("evil.Evil")},
    "a route of a route": {
        "modules.json": module(ROUTER),
        "part/router_config.json": router(ROUTER),
        "part/0/router_config.json": router("evil.Evil"),
    },
    "outside": {"modules.json": module(ROUTER, "../outside"), "../outside/router_config.json": router("evil.Evil")},
    "a tokenizer": {
        "modules.json": module(f"{MODULES}WordEmbeddings"),
        "part/wordembedding_config.json": {"tokenizer_class": "evil.Evil", "update_embeddings": False},
    },
    "a circle": {
        "modules.json": module(ROUTER, ""),
        "router_config.json": {**router(ROUTER, "."), "types": {".": ROUTER, "0": "evil.Evil"}},
    },
}


@pytest.mark.parametrize("files", HOSTILE.values(), ids=HOSTILE)
def test_a_class_that_is_not_of_sentence_transformers_is_refused(tmp_path: Path, files: dict[str, Any]) -> None:
    folder = tmp_path / "model"
    for name, content in files.items():
        write(folder, name, content)
    write(folder, "evil.py", CODE.format("sentence_transformers", "SentenceTransformer"))
    with pytest.raises(ValueError, match=r"is not part of sentence-transformers; set model\.trust_remote_code"):
        load(request(folder))
    assert not list(tmp_path.rglob("ran"))


def test_a_class_of_the_folder_runs_for_who_trusts_it(tmp_path: Path) -> None:
    save_all(tmp_path)
    folder = tmp_path / "embedder"
    assert load(request(folder)).loaded.max_tokens == 32
    modules = json.loads((folder / "modules.json").read_text())
    modules[-1]["type"] = "evil.Evil"
    write(folder, "modules.json", modules)
    write(folder, "evil.py", CODE.format(f"{MODULES}normalize", "Normalize"))
    with pytest.raises(ValueError, match=r"names the class 'evil\.Evil'"):
        load(request(folder))
    assert type(load(request(folder, trusts=True)).model).__name__ == "SentenceTransformer"


def request(folder: Path, trusts: bool = False) -> Load:
    return Load("embeddings", str(folder), "main", "cpu", "auto", None, trusts)


CASES: list[tuple[Kind | None, dict[str, Any]]] = [
    ("embeddings", {"modules.json": [], "config_sentence_transformers.json": {"prompts": {}}, "config.json": {}}),
    ("embeddings", {"config.json": {"model_type": "model2vec"}}),
    ("embeddings", {"config.json": {"architectures": ["ModernBertForMaskedLM"]}}),
    ("rerank", {"config.json": {"architectures": ["XLMRobertaForSequenceClassification"]}}),
    ("rerank", {"modules.json": [], "config_sentence_transformers.json": {"model_type": "CrossEncoder"}, "config.json": {}}),
    (None, {"config.json": {"architectures": ["LlamaForCausalLM"]}}),
    (None, {"config.json": {}}),
]


@pytest.mark.parametrize(("kind", "files"), CASES)
def test_kinds(tmp_path: Path, kind: Kind | None, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert kind_of(str(tmp_path), "main", download=False) == kind


@pytest.mark.parametrize("path", [str(models.TARGET), packaged.SMOLLM2_FILE, "owner/never-downloaded", "../nothing", ""])
def test_models_that_write_text(path: str) -> None:
    assert kind_of(path, "main", download=False) is None
