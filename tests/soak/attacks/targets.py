"""A target without a server."""

from __future__ import annotations

from tests.soak.attacks.target import Target


def target(url: str = "http://127.0.0.1:1", body_bytes: int = 20_000) -> Target:
    """Small bodies, so that tests are fast."""
    return Target(url, "m", ("key-one", "key-two"), "bystanders", body_bytes, 2048, 4096, ("<|end|>", "<|user|>"))
