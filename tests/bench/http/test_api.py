"""The front end's own cost is measured per chunk and per request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from bench.http import api


def test_every_chunk_and_every_request_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "CHUNKS", 5)
    monkeypatch.setattr(api, "REQUESTS", 3)
    assert len(asyncio.run(api.chunk_seconds())) >= 5
    assert len(asyncio.run(api.request_seconds())) == 3


def test_the_table_fits_80_columns(printed: Callable[[], str]) -> None:
    api.show({"chunk_us": {"p50": 123456.7, "p99": 1234567.8}, "request_us": {"p50": 123456.7, "p99": 1234567.8}})
    text = printed()
    assert text.count("1234567.8") == 2
