"""The application with a scripted engine in this process, without worker, model or socket."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import httpx
import msgspec
import pytest
from fastapi import FastAPI

from outrider import models
from outrider.drafters.sequence import Finish
from outrider.server import app as application
from outrider.server.chat.structured_output import GrammarChecker
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine import messages
from outrider.server.engine.engine import Engine, EngineError
from outrider.server.settings import load_settings
from outrider.verify.tokenizer import load_tokenizer
from tests.server.engine.rig import READY

TOKENIZER = load_tokenizer(str(models.TARGET))
VOCABULARY = Vocabulary(TOKENIZER)
CONTEXT_TOKENS = 1024
FIRST_TOKEN = 40  # id of an answer's first token; later ids count up


class SharedGrammars(GrammarChecker):
    """Checks the grammars of all applications, in a process that ends with the tests."""

    def close(self) -> None:
        pass


GRAMMARS = SharedGrammars()


class FakeEngine:
    """Answers every request with the same pieces of text, one event of one token each; None is a keep-alive interval.

    Choice `n` ends with `n` exclamation marks. `error` is raised after the pieces; `stop_string` is reported at the end.
    """

    ready, state = True, "ready"
    shares_files = True
    seconds_per_request = 1.0
    failure: str | None = None
    info: messages.Ready | None = None

    def __init__(
        self,
        *pieces: str | messages.Accepted | None,
        finish: Finish = "stop",
        error: EngineError | None = None,
        stop_string: str | None = None,
    ) -> None:
        self.pieces, self.finish, self.error, self.stop_string = pieces, finish, error, stop_string
        self.context_tokens = CONTEXT_TOKENS
        self.requests: list[messages.Request] = []
        self.admitted: list[bool] = []
        self.forgotten: list[str | None] = []  # sessions

    async def start(self, on_failure: Any) -> None: ...

    async def stop(self) -> None: ...

    async def wait_started(self) -> messages.Ready:
        return msgspec.structs.replace(READY, context_tokens=self.context_tokens, memory=messages.Memory(None, 1, 1, None))

    async def generate(
        self, request: messages.Request, arrived: float | None = None, admitted: bool = False
    ) -> AsyncGenerator[messages.Event | None, None]:
        choice = sum(earlier.prompt is request.prompt for earlier in self.requests)
        self.requests.append(request)
        self.admitted.append(admitted)
        for number, piece in enumerate(self.pieces):
            await asyncio.sleep(0)
            yield self._event(request, choice, number, piece) if isinstance(piece, str) else piece
        if self.error is not None:
            raise self.error
        yield self._event(request, choice, len(self.pieces), "!" * choice, self.finish)

    def forget(self, request: messages.Request) -> None:
        self.forgotten.append(request.session)

    def _event(
        self, request: messages.Request, choice: int, number: int, text: str, finish: Finish | None = None
    ) -> messages.TokenEvent:
        token, top = FIRST_TOKEN + number, request.params.logprobs
        scored = finish is None and top is not None
        logprobs = messages.TokenLogprobs([-0.5 / (1 + choice)], [[token, 7][:top]], [[-0.5, -2.0][:top]]) if scored else None
        scored_tokens = len(request.prompt) - 1
        prompt_logprobs = messages.TokenLogprobs([-1.0] * scored_tokens, [[]] * scored_tokens, [[]] * scored_tokens)
        return messages.TokenEvent(
            request.id,
            [token],
            text,
            finish,
            step=messages.StepReport(
                *(1e-4, 1e-3, 1e-4),
                drafted={"trigram": 3},
                accepted={"trigram": 1},
                trace=messages.StepTrace([token, 7, 8], [-1, 0, 0], [0.9, 0.5, 0.25], ["trigram"] * 3, [0], None, 5, 1.9, 1.4)
                if request.trace
                else None,
            ),
            cached_tokens=2 if number == 0 else 0,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs if request.wants_prompt_logprobs else None,
            stop_string=self.stop_string if finish else None,
        )


def app_with(
    engine: FakeEngine,
    template: str | None = None,
    tokens: Sequence[str] = (),
    special_tokens: Sequence[str] = (),
    **settings: Any,
) -> FastAPI:
    """The application. Setting names have `__` for a dot. The templates replace the model's own.

    `tokens` and `special_tokens` are added to the tokenizer, with ids from 4096.
    """
    tokenizer = load_tokenizer(str(models.TARGET))
    tokenizer.backend_tokenizer.add_tokens([*tokens])
    tokenizer.backend_tokenizer.add_special_tokens([*special_tokens])
    if template is not None:
        tokenizer.chat_template = template
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(application, "GrammarChecker", lambda: GRAMMARS)
        return application.create_app(load_settings(None, flags), tokenizer, new_engine=lambda *_: cast(Engine, engine))


def fetch(
    app: FastAPI, method: str, path: str, body: Any = None, client: tuple[str, int] = ("127.0.0.1", 123), **options: Any
) -> httpx.Response:
    """Sends one HTTP request from the address `client`. Adds the served model's name to a body that is a dict."""
    if isinstance(body, dict):
        body = {"model": models.NAME, **body}

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as sender:
            return await sender.request(method, path, json=body, **options)

    return asyncio.run(run())


def post(engine: FakeEngine, path: str, body: dict[str, Any], **settings: Any) -> httpx.Response:
    return fetch(app_with(engine, **settings), "POST", path, body)


def events(response: httpx.Response) -> list[Any]:
    """The data of a stream's events, parsed; "[DONE]" and comments as text."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = [block for block in response.text.split("\n\n") if block]
    lines = [block.splitlines()[-1].removeprefix("data: ") for block in blocks]
    return [json.loads(line) if line.startswith("{") else line for line in lines]
