"""Every named attack is a request that a client can send, and fits the body limit."""

from __future__ import annotations

from tests.soak.attacks.bombs import named_bombs
from tests.soak.attacks.targets import target


def test_bodies_are_bytes_of_the_expected_size() -> None:
    aim = target(body_bytes=200_000)
    for bomb in named_bombs():
        body = bomb.body(aim)
        assert body.startswith(b"{") and body.endswith(b"}")
        assert len(body) <= aim.body_bytes, bomb.kind
