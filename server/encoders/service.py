"""An encoder as the front end sees it: its process, and the requests that wait for it."""

import asyncio
import contextlib
import itertools
import re
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from outrider.server.encoders.kind import Kind
from outrider.server.encoders.messages import Embed, Failed, Load, Loaded, Score, Scores, Vectors, decode_answer, encode
from outrider.server.engine.engine import EngineError, Overloaded, ShuttingDown, WorkerLost
from outrider.server.engine.fair_queue import MAX_WAITING_TOKENS
from outrider.server.engine.helper import ANSWER_SECONDS, Helper, HelperEnded
from outrider.server.engine.supervisor import LOAD_SECONDS
from outrider.server.fair_shares import Ledger, NoRoom
from outrider.server.http.errors import APIError
from outrider.server.settings import Settings
from outrider.server.telemetry.metrics import EncoderMetrics

# At most this many texts, and characters of several texts, are in a part, and in the parts that are encoded together.
PART_TEXTS, PART_CHARACTERS = 8, 1 << 15
TEXTS, CHARACTERS = 32, 1 << 17


@dataclass(eq=False)
class Part:
    """Some texts, or pairs of texts, of a request."""

    texts: Sequence[Any]
    options: Any  # parts with equal options may be encoded together
    answer: asyncio.Future[tuple[Any, list[int]]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """The waiting parts, by principal."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Part]] = OrderedDict()  # the principal whose turn is next comes first

    def add(self, principal: str, part: Part) -> None:
        """Adds a part behind the principal's others."""
        self._waiting.setdefault(principal, deque()).append(part)

    def take(self) -> list[Part]:
        """The parts of the next batch, of one principal after the other; parts whose request has ended are dropped.

        They have equal options, and no more than TEXTS texts and CHARACTERS characters if they are several.
        """
        taken: list[Part] = []
        passed: set[str] = set()  # principals whose next part does not fit
        while principal := next((each for each in self._waiting if each not in passed), None):
            parts = self._waiting[principal]
            if not parts[0].answer.done():
                if taken and not fits(parts[0], taken):
                    passed.add(principal)
                    continue
                taken.append(parts[0])
                self._waiting.move_to_end(principal)
            parts.popleft()
            if not parts:
                del self._waiting[principal]
        return taken


def divide(texts: Sequence[Any], options: Any) -> list[Part]:
    """The parts of a request, in order."""
    parts: list[list[Any]] = []
    count = 0  # characters of the last part
    for text in texts:
        added = characters([text])
        if not parts or len(parts[-1]) == PART_TEXTS or count + added > PART_CHARACTERS:
            parts.append([])
            count = 0
        parts[-1].append(text)
        count += added
    return [Part(part, options) for part in parts]


def fits(part: Part, taken: Sequence[Part]) -> bool:
    """Whether a part may be encoded together with those taken already."""
    texts = [text for each in (*taken, part) for text in each.texts]
    return part.options == taken[0].options and len(texts) <= TEXTS and characters(texts) <= CHARACTERS


def characters(texts: Sequence[Any]) -> int:
    return sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in texts)


# A token has about this many characters. What waits is bounded in tokens, but encoders tokenize in their process.
TOKEN_CHARACTERS = 4
# Longer texts are cut here before they are tokenized: apart from runs of spaces, no text has more characters per token.
MAX_TOKEN_CHARACTERS = 16
RETRY_SECONDS = 1.0


class EncoderFailed(EngineError):
    """The model could not encode these texts."""


class EncoderService:
    """A model that encodes texts. All methods are called on the event loop, which they never block."""

    failure: ClassVar[str | None] = None  # a process that ends is started again
    seconds_per_request: ClassVar[float] = 1.0

    def __init__(self, settings: Settings, kind: Kind, metrics: EncoderMetrics) -> None:
        self._model, self.kind, self.metrics = settings.model, kind, metrics
        self._helper = Helper("outrider.server.encoders.encoder")
        self._turns = Turns()
        # What is encoded or waits; one request is encoded.
        self._requests = Ledger(settings.scheduling.max_waiting + 1)
        self._characters = Ledger(MAX_WAITING_TOKENS * TOKEN_CHARACTERS)
        self._running: asyncio.Task[None] | None = None
        self._closed = False
        self.loaded = Loaded(None, None)

    @property
    def read_characters(self) -> int | None:
        """The characters that are read of a text; None = all."""
        return None if self.loaded.max_tokens is None else self.loaded.max_tokens * MAX_TOKEN_CHARACTERS

    async def start(self) -> None:
        """Starts the process, and waits until the model is in memory. Raises EngineError.

        A process that ends later is started again, once for each batch of texts.
        """
        model = self._model
        if find_spec("sentence_transformers") is None:
            raise WorkerLost(f"{model.served_name} is an encoder, which needs the extra: pip install 'outrider[encoders]'.")
        device = None if model.device == "auto" else re.split("[,+]", model.device)[0]
        request = Load(self.kind, model.path, model.revision, device, model.dtype, model.threads, model.trust_remote_code)
        try:
            answer = await self._ask(encode(request), LOAD_SECONDS)
        except EncoderFailed as error:
            raise WorkerLost(f"{model.served_name} cannot be loaded: {error}.") from None
        assert isinstance(answer, Loaded)
        self.loaded = answer

    async def embed(
        self, principal: str, texts: Sequence[str], input_type: str | None, dimensions: int | None
    ) -> tuple[bytes, list[int]]:
        """The vectors of texts, float32 [N, D], and the tokens of each. Raises APIError and EngineError."""
        cut = [text[: self.read_characters] for text in texts]
        found = [part async for part in self._parts(principal, cut, (input_type, dimensions))]
        return b"".join(values for values, _ in found), [count for _, tokens in found for count in tokens]

    async def score(self, principal: str, query: str, documents: Sequence[str]) -> tuple[list[float], list[int]]:
        """The scores of documents for a query, and the tokens of each with the query. Raises APIError and EngineError."""
        query = query[: self.read_characters]
        pairs = [(query, document[: self.read_characters]) for document in documents]
        found = [part async for part in self._parts(principal, pairs, None)]
        return [score for values, _ in found for score in values], [count for _, tokens in found for count in tokens]

    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        tokens, dimensions = self.loaded.max_tokens, self.loaded.dimensions
        found = {"max_model_len": tokens, "context_length": tokens, "capabilities": [self.kind]}
        return found if dimensions is None else found | {"dimensions": dimensions}

    def drain(self) -> None:
        """Does nothing: the pool refuses new requests."""

    def abort(self) -> None:
        """Fails all requests, and ends the process."""
        self._closed = True
        while parts := self._turns.take():
            fail(parts, ShuttingDown())
        if self._running is not None:
            self._running.cancel()

    async def stop(self) -> None:
        self.abort()
        await self._helper.close()

    async def _parts(self, principal: str, texts: Sequence[Any], options: Any) -> AsyncIterator[tuple[Any, list[int]]]:
        """The values and tokens of the texts, part by part."""
        count, bound = characters(texts), self._characters.bound
        if count > bound:
            repeated = ", the query once for each document" if self.kind == "rerank" else ""
            message = f"The texts have {count} characters{repeated}, and {bound} are allowed in a request; send fewer texts."
            raise APIError(400, message, "documents" if self.kind == "rerank" else "input", "too_long")
        parts = divide(texts, options)
        try:
            with self._requests.hold(principal, 1), self._characters.hold(principal, count):
                for part in parts:
                    self._add(principal, part)
                for part in parts:
                    yield await part.answer
        except NoRoom:
            message = f"{self._model.served_name} is busy and its queue is full; try again shortly."
            raise Overloaded(message, "queue_full", RETRY_SECONDS) from None
        finally:  # a client that has left waits for no more
            for part in parts:
                part.answer.cancel()

    def _add(self, principal: str, part: Part) -> None:
        if self._closed:
            raise ShuttingDown
        self._turns.add(principal, part)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while parts := self._turns.take():
            await self._serve(parts)

    async def _serve(self, parts: Sequence[Part]) -> None:
        """Encodes parts together, and if that fails, one by one: one client's texts must not fail another's request."""
        started = time.perf_counter()
        try:
            answers = await self._answer(parts)
        except EngineError as error:
            if len(parts) == 1:
                fail(parts, error)
            else:
                for part in parts:
                    await self._serve([part])
            return
        except asyncio.CancelledError:
            fail(parts, ShuttingDown())
            raise
        self.metrics.record(
            sum(len(part.texts) for part in parts), sum(sum(tokens) for _, tokens in answers), time.perf_counter() - started
        )
        for part, answer in zip(parts, answers, strict=True):
            if not part.answer.done():
                part.answer.set_result(answer)

    async def _answer(self, parts: Sequence[Part]) -> list[tuple[Any, list[int]]]:
        """The values and tokens of each part. Raises EngineError."""
        texts = [text for part in parts for text in part.texts]
        request = Score(texts) if self.kind == "rerank" else Embed(texts, *parts[0].options)
        message = await asyncio.to_thread(encode, request)
        answer = None
        if self._helper.alive:
            with contextlib.suppress(WorkerLost):
                answer = await self._ask(message)
        if answer is None:
            await self.start()
            answer = await self._ask(message)
        assert isinstance(answer, Vectors | Scores)
        step = len(answer.values) // len(texts)  # bytes of a vector, or 1
        ends = itertools.accumulate(len(part.texts) for part in parts)
        spans = [(end - len(part.texts), end) for part, end in zip(parts, ends, strict=True)]
        return [(answer.values[start * step : end * step], answer.tokens[start:end]) for start, end in spans]

    async def _ask(self, message: bytes, seconds: float = ANSWER_SECONDS) -> Loaded | Vectors | Scores:
        """The program's answer. Raises EngineError."""
        try:
            answer: Loaded | Vectors | Scores | Failed = decode_answer(await self._helper.ask(message, seconds))
        except HelperEnded:
            raise WorkerLost(f"The process of {self._model.served_name} has ended; try again.") from None
        except OSError as error:
            raise WorkerLost(f"The process of {self._model.served_name} cannot be started: {error}.") from None
        if isinstance(answer, Failed):
            raise EncoderFailed(answer.message)
        return answer


def fail(parts: Sequence[Part], error: EngineError) -> None:
    """Fails the requests that wait for these parts."""
    for part in parts:
        if not part.answer.done():
            part.answer.set_exception(error)
