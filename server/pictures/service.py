"""The pictures of requests as the front end sees them: prepared by a process of its own, and kept for the next turn."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.server.engine.engine import WorkerLost
from outrider.server.engine.helper import Helper, HelperEnded
from outrider.server.engine.messages import PictureInput
from outrider.server.pictures.messages import (
    Failed,
    Load,
    Loaded,
    Prepare,
    Prepared,
    decode_answer,
    encode,
)
from outrider.server.pictures.source import invalid, read_picture
from outrider.server.settings import Settings

log = logging.getLogger("outrider")
# Agents send a picture again in each later turn.
KEPT_BYTES = 128 << 20
MAX_PICTURES = 32
# A small file can be a large picture, and the pixels of all pictures of a request are in memory together.
REQUEST_BYTES = 128 << 20


@dataclass(frozen=True)
class RequestPictures:
    """The pictures of one request, in the prompt's order."""

    placeholder: str  # what the chat template writes for each
    prepared: Sequence[Prepared] = ()


NO_PICTURES = RequestPictures("")


class PictureService:
    """Prepares pictures for one model. All methods are called on the event loop; pictures are decoded in a process."""

    def __init__(self, settings: Settings) -> None:
        self._model, self._fetches = settings.model, settings.limits.fetch_pictures
        self._helper = Helper("outrider.server.pictures.preparer")
        self._available: bool | None = None  # None = not known yet
        self._placeholder = ""
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()  # by digest of the file; the latest last
        self._key = secrets.token_bytes(16)

    async def is_available(self) -> bool:
        """Whether pictures can be prepared: the packages are there, and read the model's processor. Raises EngineError."""
        if self._available is None:
            self._available = importlib.util.find_spec("PIL") is not None
            if not self._available:
                log.warning("pictures are left out of prompts; they need an extra: pip install 'outrider[pictures]'")
        if self._available and not self._helper.alive:
            await self._load()
        return self._available

    async def prepare(self, urls: Sequence[str]) -> RequestPictures:
        """The pictures at these URLs. Raises APIError and EngineError."""
        if len(urls) > MAX_PICTURES:
            raise invalid(f"The conversation has {len(urls)} pictures, and {MAX_PICTURES} are allowed; leave some out.")
        prepared, size = list[Prepared](), 0
        for url in urls:
            prepared.append(await self._prepare(await read_picture(url, self._fetches)))
            size += size_of(prepared[-1])
            if size > REQUEST_BYTES:
                message = f"The pictures take more than {REQUEST_BYTES >> 20} MiB as the model reads them; scale them down."
                raise invalid(message)
        return RequestPictures(self._placeholder, prepared)

    async def close(self) -> None:
        """Ends the process."""
        await self._helper.close()

    async def _prepare(self, data: bytes) -> Prepared:
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        if not await self.is_available():
            raise WorkerLost("The process that prepares pictures cannot be started again; leave the pictures out.")
        answer = await self._ask(encode(Prepare(data)))
        if isinstance(answer, Failed):
            raise invalid(f"A picture {answer.message}.")
        assert isinstance(answer, Prepared)
        self._kept[digest] = answer
        while sum(map(size_of, self._kept.values())) > KEPT_BYTES and len(self._kept) > 1:
            self._kept.popitem(last=False)
        return answer

    async def _load(self) -> None:
        """Starts the process, and waits until it has the model's processor."""
        answer = await self._ask(encode(Load(self._model.path, self._model.revision, self._model.trust_remote_code)))
        if isinstance(answer, Failed):
            self._available = False
            log.warning("pictures are left out of prompts; they %s", answer.message)
            return await self._helper.close()
        assert isinstance(answer, Loaded)
        self._placeholder = answer.placeholder

    async def _ask(self, message: bytes) -> Loaded | Prepared | Failed:
        try:
            answer: Loaded | Prepared | Failed = decode_answer(await self._helper.ask(message))
        except HelperEnded:
            raise WorkerLost("The process that prepares pictures has ended; try again.") from None
        except OSError as error:
            raise WorkerLost(f"The process that prepares pictures cannot be started: {error}.") from None
        return answer

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
    """Where a part of a prompt begins, from `start` on."""
    for place in range(start, len(tokens) - len(part) + 1):
        if tokens[place] == part[0] and tokens[place : place + len(part)] == part:
            return place
    raise invalid("The model's tokenizer does not find a picture's tokens in the prompt; leave the picture out.")


def size_of(picture: Prepared) -> int:
    """The bytes of a prepared picture's arrays."""
    return sum(len(array.data) for array in picture.arrays.values())
