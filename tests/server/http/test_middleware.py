"""Body limits and the room that all bodies share, headers, request metrics, the request log; and errors in every format."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from outrider.server.engine.engine import DeadlineExceeded, EngineError, InvalidRequest, Overloaded, WorkerLost
from outrider.server.http import errors
from outrider.server.http.body_budget import SMALL_BYTES, BodyBudget
from outrider.server.http.errors import CLIENT_CLOSED_REQUEST, APIError, from_engine, install
from outrider.server.http.middleware import BodyLimit, RecordRequests
from outrider.server.settings import Logging
from outrider.server.telemetry.metrics import Metrics
from tests.server.fakes import fetch
from tests.server.http.test_sse import Timeless


def app_with(middleware: Any, **options: Any) -> FastAPI:
    app = FastAPI()
    app.add_middleware(middleware, **options)
    errors.install(app)

    @app.post("/things/{name}")
    async def thing(http: Request, name: str) -> int:
        size = len(await http.body())
        if name == "broken":
            raise RuntimeError("broken")
        http.state.principal, http.state.stats = "alice", {"steps": 3}
        return size

    @app.get("/health")
    async def health() -> None: ...

    return app


def fetch_at(app: FastAPI, path: str = "/things/a", method: str = "POST", **options: Any) -> httpx.Response:
    return asyncio.run(request(app, path, method, **options))


async def request(app: FastAPI, path: str, method: str, **options: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.request(method, path, **options)


async def chunks(count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b"x" * 10


def test_larger_bodies_are_refused_with_and_without_content_length() -> None:
    app = app_with(BodyLimit, limit_bytes=100, limit_seconds=30)
    for content in (b"x" * 101, chunks(11)):
        response = fetch_at(app, content=content)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(("size", "interval_seconds", "expected"), [(1, 1.0, 408), (0, 1e6, 408), (1 << 14, 0.9, 200)])
def test_a_body_that_trickles_is_refused_and_a_slow_one_is_not(size: int, interval_seconds: float, expected: int) -> None:
    """40 chunks, by a virtual clock: one byte a second, nothing at all, and a little more than the slowest rate allowed."""
    app = app_with(BodyLimit, limit_bytes=1 << 20, limit_seconds=30)

    async def slowly() -> AsyncIterator[bytes]:
        for _ in range(40):
            await asyncio.sleep(interval_seconds)
            yield b"x" * size

    with asyncio.Runner(loop_factory=Timeless) as runner:
        response = runner.run(request(app, "/things/a", "POST", content=slowly()))
    assert response.status_code == expected
    if expected == 408:
        assert (response.json()["error"]["code"], response.headers["connection"]) == ("body_too_slow", "close")


@pytest.mark.parametrize("noticed_by", ["the connection", "the application", "nobody"])
@pytest.mark.parametrize("status", [200, 400, 404, 429, 500, 503])
def test_whatever_is_answered_to_a_client_that_has_left_counts_as_closed(status: int, noticed_by: str) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": status})

    async def receive() -> Message:
        return {"type": "http.disconnect" if noticed_by == "the application" else "http.request"}

    async def send(message: Message) -> None:
        sent.append(message["status"])

    sent: list[int] = []
    connection = {"closed_status": lambda: CLIENT_CLOSED_REQUEST if noticed_by == "the connection" else None}
    asyncio.run(RecordRequests(answer, Metrics(), Logging())({"type": "http", "method": "POST", **connection}, receive, send))
    assert sent == [status if noticed_by == "nobody" else CLIENT_CLOSED_REQUEST]


def test_responses_are_counted_by_route_and_status() -> None:
    metrics = Metrics()
    app = app_with(RecordRequests, metrics=metrics, settings=Logging())
    for path in ("/things/a", "/things/b", "/things/broken", "/secret"):
        fetch_at(app, path)
    text = metrics.render().decode()
    for endpoint, status, count in (("/things/{name}", 200, 2), ("/things/{name}", 500, 1), ("other", 404, 1)):
        assert f'outrider_requests_total{{endpoint="{endpoint}",status="{status}"}} {count}.0' in text
    assert "secret" not in text


LARGE = 1 << 20


async def test_a_client_that_fills_its_share_keeps_no_other_waiting() -> None:
    budget = BodyBudget(total_bytes=100, client_bytes=40)
    assert [await budget.take("mallory", 20) for _ in range(2)] == [20, 20]
    third = asyncio.create_task(budget.take("mallory", 20))
    await asyncio.sleep(0)
    assert not third.done() and await budget.take("bob", 400) == 40  # as much as a client may have
    late = asyncio.create_task(budget.take("carol", 30))
    await asyncio.sleep(0)
    assert not late.done()  # 80 of 100
    budget.give("mallory", 20)
    assert await third == 20
    budget.give("bob", 40)
    assert await late == 30
    budget.give("carol", 30)
    budget.give("mallory", 20)
    budget.give("mallory", 20)
    assert not budget._held


async def test_a_body_whose_client_leaves_gives_its_room_back() -> None:
    for steps in range(4):
        budget = BodyBudget(total_bytes=10, client_bytes=10)
        await budget.take("a", 10)
        waiting = asyncio.create_task(budget.take("a", 10))
        await asyncio.sleep(0)
        if steps % 2:
            budget.give("a", 10)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        if not steps % 2:
            budget.give("a", 10)
        assert not budget._held


def app_of(budget: BodyBudget, seconds: float = 5) -> FastAPI:
    app = FastAPI()
    app.add_middleware(BodyLimit, limit_bytes=8 << 20, limit_seconds=seconds, budget=budget)
    errors.install(app)

    @app.post("/")
    async def length(http: Request) -> int:
        return len(await http.body())

    return app


async def endless(open_bytes: list[int], gate: asyncio.Event) -> AsyncIterator[bytes]:
    for _ in range(LARGE // SMALL_BYTES):
        open_bytes[0] += SMALL_BYTES
        yield b"x" * SMALL_BYTES
    await gate.wait()
    yield b"x"


async def test_bodies_that_never_end_are_read_only_as_far_as_there_is_room() -> None:
    """200 bodies of one client; another one's is answered meanwhile, and small ones always."""
    budget = BodyBudget()
    app, read, gate = app_of(budget), [0], asyncio.Event()

    def client(address: str) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app, client=(address, 1))
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=None)

    async with client("1.1.1.1") as mallory, client("2.2.2.2") as bob:
        open_bodies = [asyncio.create_task(mallory.post("/", content=endless(read, gate))) for _ in range(200)]
        before = -1
        while before != read[0]:  # until nothing more is read
            before = read[0]
            for _ in range(100):
                await asyncio.sleep(0)
        assert read[0] <= 200 * SMALL_BYTES + (16 << 20) and budget._held.total() <= 16 << 20
        assert (await bob.post("/", content=b"x" * LARGE)).json() == LARGE
        assert (await mallory.post("/", content=b"x" * 10)).json() == 10
        gate.set()
        answers = await asyncio.gather(*open_bodies)
    assert {answer.status_code for answer in answers} == {200} and not budget._held


def test_a_body_that_gets_no_room_in_time_is_refused() -> None:
    async def run() -> Any:
        budget = BodyBudget(total_bytes=LARGE, client_bytes=LARGE)
        await budget.take("another", LARGE)
        transport = httpx.ASGITransport(app_of(budget, seconds=0.05))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post("/", content=b"x" * LARGE)

    answer = asyncio.run(run())
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "too_many_bodies")


class Thing(BaseModel):
    stop: str | list[str]


def answer(error: Exception | None = None, method: str = "POST", path: str = "/thing", **options: Any) -> httpx.Response:
    """The response of an application whose only route raises `error`."""
    app = FastAPI()
    install(app)

    @app.post("/thing")
    @app.post("/v1/messages")
    @app.post("/api/chat")
    async def thing(body: Thing) -> None:
        if error is not None:
            raise error

    return fetch(app, method, path, {"stop": "x"}, **options)


@pytest.mark.parametrize(
    ("error", "status", "code", "kind"),
    [
        (Overloaded("full", "queue_full", 2.2), 429, "queue_full", "rate_limit_error"),
        (InvalidRequest("no"), 400, "invalid_value", "invalid_request_error"),
        (WorkerLost("lost"), 503, "worker_unavailable", "service_unavailable_error"),
        (DeadlineExceeded("late"), 503, "deadline_exceeded", "service_unavailable_error"),
        (EngineError("odd"), 500, "internal_error", "server_error"),
    ],
)
def test_engine_errors(error: EngineError, status: int, code: str, kind: str) -> None:
    response = answer(error)
    assert response.status_code == status == from_engine(error).status_code
    assert response.json() == {"error": {"message": str(error), "type": kind, "param": None, "code": code}}
    assert response.headers.get("retry-after") == {429: "3", 503: "1"}.get(status)


def test_messages_do_not_repeat_a_value_of_a_megabyte() -> None:
    message = f"The model {'x' * 1_000_000!r} does not exist; choose another."
    error = answer(APIError(404, message, "y" * 1_000_000)).json()["error"]
    assert error["message"].startswith("The model 'x") and error["message"].endswith("choose another.")
    assert len(error["message"]) < 1000 and len(error["param"]) < 200


def test_other_exceptions_are_a_500_without_details() -> None:
    response = answer(RuntimeError("a secret"))
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text


@pytest.mark.parametrize(("error", "status"), [(Overloaded("full", "queue_full", 2.2), 429), (APIError(404, "full"), 404)])
def test_the_paths_of_ollamas_api_have_its_errors(error: Exception, status: int) -> None:
    response = answer(error, path="/api/chat")
    assert (response.status_code, response.json()) == (status, {"error": "full"})
    assert response.headers.get("retry-after") == {429: "3"}.get(status)
    assert answer(path="/api/create").json() == {"error": "There is no endpoint POST /api/create."}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("full", "queue_full", 2.2), 429, "rate_limit_error"),
        (WorkerLost("lost"), 529, "overloaded_error"),
        (EngineError("odd"), 500, "api_error"),
        (APIError(401, "odd"), 401, "authentication_error"),
        (APIError(404, "odd", "model", "model_not_found"), 404, "not_found_error"),
        (APIError(413, "odd"), 413, "request_too_large"),
        (RuntimeError("a secret"), 500, "api_error"),
    ],
)
def test_the_paths_of_anthropics_api_have_its_errors(error: Exception, status: int, kind: str) -> None:
    response = answer(error, path="/v1/messages")
    assert (response.status_code, response.json()["error"]["type"]) == (status, kind)
    assert set(response.json()) == {"type", "error", "request_id"} and set(response.json()["error"]) == {"type", "message"}
    assert response.json()["type"] == "error" and "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 529))
