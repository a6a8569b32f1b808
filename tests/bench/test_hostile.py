"""Hostile requests: bodies, headers, raw bytes, and the responses that count as bad."""

from __future__ import annotations

import asyncio
import json
import random

import httpx
import pytest

from bench.hostile import FIELDS, VALID, Attack, broken_http, encode, mutated, nested, odd_headers


def test_bodies_as_careless_clients_write_them() -> None:
    assert encode({"a": nested(3), "b": float("nan")}) == b'{"a": [[[]]], "b": NaN}'
    assert encode({"a": "\ud800"}) == b'{"a": "\\ud800"}'
    rng = random.Random(0)
    bodies = [mutated(rng, path, "m") for path in VALID for _ in range(50)]
    readable = 0
    for body in bodies:
        try:
            json.loads(body)
            readable += 1
        except (ValueError, RecursionError):
            pass
    assert len(bodies) // 2 < readable < len(bodies)


def test_the_same_seed_makes_the_same_requests() -> None:
    bodies = [[mutated(rng, "/tokenize", "m") for _ in range(20)] for rng in (random.Random(5), random.Random(5))]
    assert bodies[0] == bodies[1]
    assert len(set(bodies[0])) > 10
    assert "seed" in FIELDS


def test_headers_and_raw_bytes_can_be_sent() -> None:
    rng = random.Random(1)
    for _ in range(200):
        assert all(value.isascii() for value in odd_headers(rng).values())
    assert len({broken_http(rng, "127.0.0.1:1") for _ in range(200)}) > 10


@pytest.mark.parametrize(("status", "bad"), [(200, 0), (400, 0), (500, 1)])
def test_a_server_error_is_bad(status: int, bad: int) -> None:
    attack = Attack("http://server", 1, 0)
    client = httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(lambda request: httpx.Response(status)))
    asyncio.run(attack._send(client, "POST", "/tokenize", b"{}"))
    assert attack._statuses == {str(status): 1}
    assert len(attack._bad) == bad


def test_a_request_that_hangs_is_bad() -> None:
    def hang(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("")

    attack = Attack("http://server", 1, 0)
    asyncio.run(
        attack._send(httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(hang)), "POST", "/", b"")
    )
    assert attack._statuses == {"hangs": 1}
    assert len(attack._bad) == 1
