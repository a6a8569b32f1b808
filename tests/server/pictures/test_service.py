"""The pictures of requests, prepared by a process that is a stand-in here."""

import base64
import gc
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.server.engine.engine import Overloaded, WorkerLost
from outrider.server.engine.helper import HelperEnded
from outrider.server.engine.messages import Array
from outrider.server.http.errors import APIError
from outrider.server.pictures import service as module
from outrider.server.pictures.messages import Failed, Load, Loaded, Prepared, decode_request, encode
from outrider.server.pictures.service import PictureService
from outrider.server.settings import load_settings

TOKENS = [9, 9, 8, 9]
PIXELS = 100


def prepared(data: bytes, size: int = 10) -> Prepared:
    return Prepared("<p>", TOKENS, {"pixel_values": Array("uint8", (size,), bytes(size))}, data.ljust(32), PIXELS)


class Program:
    """The process: refuses "bad" pictures, and ends at a "fatal" one."""

    def __init__(self) -> None:
        self.loads = self.closes = 0
        self.pictures: list[bytes] = []
        self.fails_to_load = False

    def ask(self, message: bytes, seconds: float) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        request = decode_request(message)
        if isinstance(request, Load):
            self.loads += 1
            return encode(Failed("cannot be prepared: no") if self.fails_to_load else Loaded("<p>"))
        self.pictures.append(request.data)
        if request.data == b"bad":
            return encode(Failed("cannot be read"))
        if request.data == b"fatal":
            raise HelperEnded
        if request.data == b"slow":
            raise HelperEnded(-signal.SIGPROF)
        return encode(prepared(request.data))

    def close(self) -> None:
        self.closes += 1


@asynccontextmanager
async def running() -> AsyncIterator[tuple[PictureService, Program]]:
    with pytest.MonkeyPatch.context() as patch:
        program = Program()
        patch.setattr(module, "BlockingHelper", lambda _: program)
        service = PictureService(load_settings(None, {}))
        yield service, program
        await service.close()


def url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


async def test_a_picture_is_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", 25)
    async with running() as (service, program):
        first = await service.prepare("a", [url(b"a"), url(b"b"), url(b"a")])
        assert first.placeholder == "<p>" and first.prepared == [prepared(name) for name in (b"a", b"b", b"a")]
        await service.prepare("a", [url(b"c"), url(b"a")])  # the third one makes the second one go
        await service.prepare("a", [url(b"b")])
        assert program.pictures == [b"a", b"b", b"c", b"b"] and program.loads == 1


async def test_failures() -> None:
    async with running() as (service, program):
        with pytest.raises(APIError, match=r"A picture cannot be read\."):
            await service.prepare("a", [url(b"bad")])
        with pytest.raises(WorkerLost, match="has ended; try again"):
            await service.prepare("a", [url(b"fatal")])
        with pytest.raises(APIError, match="takes too long to prepare; scale it down"):
            await service.prepare("a", [url(b"slow")])
        assert (await service.prepare("a", [url(b"a")])).prepared == [prepared(b"a")]
        assert program.loads == 3


async def test_prompts_are_equal_only_if_their_pictures_are() -> None:
    async with running() as (service, _):
        prompt, rare = [1, *TOKENS, 2, *TOKENS, 3], list(range(100, 200))
        tokens, pictures = service.place(prompt, [prepared(b"a"), prepared(b"b")], rare)
        assert [picture.start for picture in pictures] == [1, 6] and pictures[0].tokens == TOKENS
        assert (tokens[0], tokens[5], tokens[10]) == (1, 2, 3) and set(tokens[1:5] + tokens[6:10]) <= set(rare)
        same, _pictures = service.place(prompt, [prepared(b"a"), prepared(b"c")], rare)
        assert same[:6] == tokens[:6] and same[6:10] != tokens[6:10]
        elsewhere = PictureService(load_settings(None, {}))
        assert elsewhere.place(prompt, [prepared(b"a"), prepared(b"b")], rare)[0] != tokens
        with pytest.raises(APIError, match="does not find a picture's tokens"):
            service.place([1, 2, 3], [prepared(b"a")], rare)


async def test_the_pixels_of_a_request_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUEST_BYTES", 25)
    async with running() as (service, program):
        assert len((await service.prepare("a", [url(b"a"), url(b"a")])).prepared) == 2
        with pytest.raises(APIError, match="take more than 0 MiB as the model reads them"):
            await service.prepare("a", [url(b"a"), url(b"b"), url(b"c"), url(b"d")])
        assert program.pictures == [b"a", b"b", b"c"]


async def test_a_kept_picture_is_not_used_for_another_principal() -> None:
    async with running() as (service, program):
        for principal in ("alice", "bob", "alice", "bob"):
            await service.prepare(principal, [url(b"a")])
        assert program.pictures == [b"a", b"a"]


async def test_the_pictures_of_running_requests_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RUNNING_BYTES", 25)
    async with running() as (service, _):
        first = await service.prepare("alice", [url(b"a"), url(b"b")])
        _, inputs = service.place([*TOKENS, *TOKENS], first.prepared, range(100))
        with pytest.raises(Overloaded):
            await service.prepare("alice", [url(b"a")])
        bobs = await service.prepare("bob", [url(b"a")])
        del first
        gc.collect()
        with pytest.raises(Overloaded):  # a running request has them
            await service.prepare("alice", [url(b"a")])
        del inputs, bobs
        gc.collect()
        assert (await service.prepare("alice", [url(b"a"), url(b"b")])).prepared


async def test_the_number_of_pictures_is_limited() -> None:
    async with running() as (service, program):
        with pytest.raises(APIError, match="has 33 pictures, and 32 are allowed"):
            await service.prepare("a", [url(b"a")] * 33)
        assert not program.pictures
