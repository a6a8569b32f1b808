"""The pictures of requests as the front end sees them: prepared by a process of its own, and kept for the next turn.

Promises that principals take turns, each with one picture at a time, that the event loop reads no picture, and that the
pictures of all running requests are bounded. A kept picture is used for the principal that has sent it only.
"""

import asyncio
import hashlib
import importlib.util
import logging
import secrets
import signal
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from outrider.server.engine.engine import Overloaded, WorkerLost
from outrider.server.engine.helper import BlockingHelper, HelperEnded
from outrider.server.engine.messages import Array, PictureInput
from outrider.server.fair_shares import Ledger, NoRoom
from outrider.server.fair_threads import FairThreads
from outrider.server.pictures.messages import Failed, Load, Loaded, Prepare, Prepared, decode_answer, encode
from outrider.server.pictures.source import invalid, read_picture
from outrider.server.settings import Settings

log = logging.getLogger("outrider")
# Agents send a picture again in each later turn.
KEPT_BYTES = 128 << 20
MAX_PICTURES = 32
# A small file can be a large picture, and the pixels of all pictures of a request are in memory together.
REQUEST_BYTES = 128 << 20
REQUEST_PIXELS = 128_000_000
# The pictures of all requests that run or wait.
RUNNING_BYTES = 1 << 30
# So many files are fetched or read at once, each of at most source.MAX_BYTES. One picture at a time is prepared.
PLACES = 8
RETRY_SECONDS = 5.0
# The process limits its processor time itself; this is for one that waits or was stopped.
ANSWER_SECONDS = 120.0
# From a slow disk or the hub.
LOAD_SECONDS = 600.0


@dataclass(frozen=True)
class RequestPictures:
    """The pictures of one request, in the prompt's order."""

    placeholder: str  # what the chat template writes for each
    prepared: Sequence[Prepared] = ()


class HeldArrays(dict[str, Array]):
    """The arrays of a request's picture, which are given back to the ledger when nothing refers to them any more."""


NO_PICTURES = RequestPictures("")


class PictureService:
    """Prepares pictures for one model. All public methods are called on the event loop, which they never block."""

    def __init__(self, settings: Settings) -> None:
        self._model, self._fetches = settings.model, settings.limits.fetch_pictures
        self._reading = FairThreads([None] * PLACES, "outrider-pictures")
        self._preparing = FairThreads([None], "outrider-picture-process")  # the one thread that starts and asks the process
        self._running = Ledger(RUNNING_BYTES)
        self._process: BlockingHelper | None = None
        self._available: bool | None = None  # None = not known yet
        self._placeholder = ""
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()  # by digest of principal and file; the latest last
        self._key = secrets.token_bytes(16)

    async def is_available(self) -> bool:
        """Whether pictures can be prepared: the packages are there, and read the model's processor. Raises EngineError."""
        if self._available is not None and (self._process is not None or not self._available):
            return self._available
        return await self._preparing.run("", lambda _: self._load())

    async def prepare(self, principal: str, urls: Sequence[str]) -> RequestPictures:
        """The pictures at these URLs. Raises APIError and EngineError."""
        if len(urls) > MAX_PICTURES:
            raise invalid(f"The conversation has {len(urls)} pictures, and {MAX_PICTURES} are allowed; leave some out.")
        prepared, size, pixels = list[Prepared](), 0, 0
        for url in urls:
            found = await self._prepare_one(principal, url, REQUEST_PIXELS - pixels, REQUEST_BYTES - size)
            size, pixels = size + size_of(found), pixels + found.pixels
            if size > REQUEST_BYTES or pixels > REQUEST_PIXELS:  # by pictures that were kept
                message = f"The pictures take more than {REQUEST_BYTES >> 20} MiB as the model reads them; scale them down."
                raise invalid(message)
            prepared.append(self._hold(principal, found))
        return RequestPictures(self._placeholder, prepared)

    async def close(self) -> None:
        """Ends the process, and another one if a picture that waits for its turn starts it."""
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
        await asyncio.to_thread(self._preparing.close)
        await asyncio.to_thread(self._reading.close)
        await asyncio.to_thread(self._end)

    def _hold(self, principal: str, found: Prepared) -> Prepared:
        """A picture that counts among those of running requests until the request has ended. Raises Overloaded."""
        arrays, size = HeldArrays(found.arrays), size_of(found)
        try:
            self._running.take(principal, size)
        except NoRoom:
            message = "The server is busy with the pictures of other requests; try again shortly."
            raise Overloaded(message, "queue_full", RETRY_SECONDS) from None
        weakref.finalize(arrays, self._running.release, principal, size).atexit = False
        return msgspec.structs.replace(found, arrays=arrays)

    async def _prepare_one(self, principal: str, url: str, max_pixels: int, max_bytes: int) -> Prepared:
        """The picture at a URL. Raises APIError and EngineError."""
        data, digest = await self._reading.run(principal, lambda _: self._read(principal, url))
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        request = encode(Prepare(data, max_pixels, max_bytes))
        found = self._kept[digest] = await self._preparing.run(principal, lambda _: self._prepare(request))
        while sum(map(size_of, self._kept.values())) > KEPT_BYTES:
            self._kept.popitem(last=False)
        return found

    def _read(self, principal: str, url: str) -> tuple[bytes, bytes]:
        """The file at a URL, and its digest for the principal. Raises APIError."""
        data = asyncio.run(read_picture(url, self._fetches))
        return data, hashlib.blake2b(data, digest_size=16, key=hashlib.sha256(principal.encode()).digest()).digest()

    def _prepare(self, request: bytes) -> Prepared:
        """Lets the process prepare a file. Raises APIError and EngineError."""
        if not self._load():
            raise WorkerLost("The process that prepares pictures cannot be started again; leave the pictures out.")
        answer = self._ask(request, ANSWER_SECONDS)
        if isinstance(answer, Failed):
            raise invalid(f"A picture {answer.message}.")
        assert isinstance(answer, Prepared)
        return answer

    def _load(self) -> bool:
        """Starts the process if there is none, and waits until it has the model's processor; `is_available`."""
        if self._available is None:
            self._available = importlib.util.find_spec("PIL") is not None
            if not self._available:
                log.warning("pictures are left out of prompts; they need an extra: pip install 'outrider[pictures]'")
        if not self._available or self._process is not None:
            return self._available
        request = Load(self._model.path, self._model.revision, self._model.trust_remote_code)
        answer = self._ask(encode(request), LOAD_SECONDS)
        if isinstance(answer, Failed):
            self._available = False
            log.warning("pictures are left out of prompts; they %s", answer.message)
            self._end()
        else:
            assert isinstance(answer, Loaded)
            self._placeholder = answer.placeholder
        return self._available

    def _ask(self, message: bytes, seconds: float) -> Loaded | Prepared | Failed:
        """The process's answer. Raises EngineError, and APIError if a picture took too long."""
        try:
            self._process = self._process or BlockingHelper("outrider.server.pictures.preparer")
            answer: Loaded | Prepared | Failed = decode_answer(self._process.ask(message, seconds))
        except HelperEnded as ended:
            self._process = None
            if ended.code == -signal.SIGPROF:  # its limit of processor time
                raise invalid("A picture takes too long to prepare; scale it down.") from None
            raise WorkerLost("The process that prepares pictures has ended; try again.") from None
        except OSError as error:
            raise WorkerLost(f"The process that prepares pictures cannot be started: {error}.") from None
        return answer

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def place(
        self, prompt: Sequence[int], pictures: Sequence[Prepared], rare: Sequence[int]
    ) -> tuple[list[int], list[PictureInput]]:
        """The prompt with a digest's tokens, out of `rare` ones, in the place of its pictures; and the pictures.

        So prompts have the same beginning only if their pictures are the same. The digest has a secret key: no text can be
        chosen that has the tokens of a picture. Rare ones, since drafts follow what texts have.
        """
        tokens, inputs, start = list(prompt), list[PictureInput](), 0
        for picture in pictures:
            start = find(tokens, picture.tokens, start)
            digest = hashlib.blake2b(picture.digest, digest_size=32, key=self._key).digest()
            chosen = np.random.default_rng(np.frombuffer(digest, np.uint32)).integers(len(rare), size=len(picture.tokens))
            inputs.append(PictureInput(start, picture.tokens, picture.arrays))
            tokens[start : start + len(chosen)] = [rare[number] for number in chosen.tolist()]
            start += len(chosen)
        return tokens, inputs


def find(tokens: Sequence[int], part: Sequence[int], start: int) -> int:
    """The index at which a part of a prompt begins, from `start` on."""
    for place in range(start, len(tokens) - len(part) + 1):
        if tokens[place] == part[0] and tokens[place : place + len(part)] == part:
            return place
    raise invalid("The model's tokenizer does not find a picture's tokens in the prompt; leave the picture out.")


def size_of(picture: Prepared) -> int:
    """The bytes of a prepared picture's arrays."""
    return sum(len(array.data) for array in picture.arrays.values())
