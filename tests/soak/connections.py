"""A server under attack, and connections that are used wrongly: endless uploads, unread answers, clients that say nothing."""

import asyncio
import itertools
import json
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from outrider import models
from outrider.server.settings import Settings
from outrider.verify.tokenizer import load_tokenizer

ANSWER_SECONDS = 1.0
HELD = 64  # connections that stay open; the oldest is closed when another is opened
SMALL_BUFFER = 4096  # bytes; the rest of an answer that nobody reads stays with the server
NUMBERS = itertools.count()  # so that no session is used twice
ENDLESS: dict[str, Any] = {"temperature": 1.5, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Target:
    """A server under attack."""

    url: str
    key: str
    body_bytes: int  # the server's limit
    context_tokens: int
    special_tokens: tuple[str, ...]
    model: str = models.NAME

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80


def survey(url: str, key: str) -> Target:
    """Asks a running server, and the files of its model."""
    fields = {"prompt": "x", "model": models.NAME}
    counted = httpx.post(f"{url}/tokenize", json=fields, headers={"Authorization": f"Bearer {key}"}, timeout=60).json()
    tokens = tuple(load_tokenizer(str(models.TARGET)).all_special_tokens)
    return Target(url, key, Settings().limits.body_bytes, counted["max_model_len"], tokens)


def head(target: Target, length: str, path: str = "/v1/completions", key: str | None = None) -> bytes:
    """The head of a POST; `length` is the Content-Length or Transfer-Encoding line."""
    lines = [f"POST {path} HTTP/1.1", f"Host: {target.host}", "Content-Type: application/json", length]
    lines.append(f"Authorization: Bearer {key or target.key}")
    return "\r\n".join([*lines, "", ""]).encode()


def whole(target: Target, key: str | None = None, **fields: Any) -> bytes:
    """A complete completion request."""
    body = json.dumps({"model": target.model, "prompt": "x", **fields}).encode()
    return head(target, f"Content-Length: {len(body)}", key=key) + body


HOLDS: dict[str, Callable[[Target], bytes]] = {
    "silent": lambda target: b"",
    "half a head": lambda target: head(target, "Content-Length: 9")[:60],
    "half an upload": lambda target: head(target, f"Content-Length: {target.body_bytes}") + b'{"prompt": "' + b"x" * 1000,
    "half a large upload": lambda target: (
        head(target, f"Content-Length: {target.body_bytes}") + b"[" * (target.body_bytes // 2)
    ),
    "half an upload without a key": lambda target: head(target, f"Content-Length: {target.body_bytes}", key="wrong-key") + b"{",
    "a chunk without end": lambda target: head(target, "Transfer-Encoding: chunked") + b'5\r\n{"a":\r\n',
    "unread stream": lambda target: whole(target, **ENDLESS),
    "unread stream of a long text": lambda target: whole(
        target, prompt=[5] * (target.context_tokens // 2), logprobs=20, session_id=f"unread {next(NUMBERS)}", **ENDLESS
    ),
    "unread streams of many choices": lambda target: whole(target, n=16, **ENDLESS),
    "unread answer": lambda target: whole(target, prompt=[5] * (target.context_tokens // 2), echo=True, logprobs=20, n=4),
    "unread pipeline": lambda target: whole(target, max_tokens=1) * 50,
}


async def send_raw(target: Target, content: bytes) -> str:
    """Sends bytes; returns the status code, "closed", "refused" or "waits" (no answer within ANSWER_SECONDS)."""
    try:
        reader, writer = await asyncio.open_connection(*target.address)
    except OSError:
        return "refused"
    try:
        writer.write(content)
        await writer.drain()
        received = await asyncio.wait_for(reader.read(SMALL_BUFFER), ANSWER_SECONDS)
        words = received.split(b" ", 2)
        return words[1].decode("latin-1") if len(words) > 1 else "closed"
    except TimeoutError:
        return "waits"  # for the rest of the request
    except OSError:
        return "closed"
    finally:
        writer.close()


class HeldConnections:
    """Keeps connections open without reading from them."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._open: deque[socket.socket] = deque()

    async def hold(self, content: bytes) -> str:
        """Opens a connection and sends `content`. Returns "held", or "refused" if the server closes it."""
        loop = asyncio.get_running_loop()
        made = socket.socket()
        self._open.append(made)
        if len(self._open) > HELD:
            self._open.popleft().close()
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await loop.sock_connect(made, self._target.address)
                await loop.sock_sendall(made, content)
        except TimeoutError:
            return "held"  # the server does not take all of it
        except OSError:
            return "refused"
        return "held"

    def close(self) -> None:
        """Closes all connections."""
        while self._open:
            self._open.pop().close()
