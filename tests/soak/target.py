"""What the attacks know about their server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx

from bench.http.client import served_model
from outrider.server.settings import Settings
from outrider.verify.tokenizer import load_tokenizer

BYSTANDER = "bystander"  # the name of the key that takes no part in the attack


@dataclass(frozen=True)
class Target:
    """A server under attack."""

    url: str
    model: str
    keys: tuple[str, ...]  # of the attackers
    bystanders_key: str
    body_bytes: int  # the server's limit
    context_tokens: int
    special_tokens: tuple[str, ...]

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 80


async def survey(url: str, settings: Settings) -> Target:
    """Asks a running server, and the files of its model."""
    keys = {name: key.key.get_secret_value() for name, key in settings.auth.keys.items()}
    bystanders_key = keys.pop(BYSTANDER)
    headers = {"Authorization": f"Bearer {bystanders_key}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as client:
        counted = (await client.post("/tokenize", json={"prompt": "x"})).json()
        model = await served_model(client)
    return Target(
        url,
        model,
        tuple(keys.values()),
        bystanders_key,
        settings.limits.body_bytes,
        counted["max_model_len"],
        tuple(load_tokenizer(settings.model.path).all_special_tokens),
    )
