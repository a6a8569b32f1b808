"""What the attacks know about their server."""

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from outrider import models
from outrider.server.settings import Settings
from outrider.verify.tokenizer import load_tokenizer


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
