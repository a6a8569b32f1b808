"""Requests of the overload have answers of one length, each with its own seed."""

from __future__ import annotations

from bench.overload import TOKENS, request_fields


def test_requests_differ_by_seed_and_not_by_length() -> None:
    fields = [request_fields("m", number) for number in range(20)]
    assert {body["max_tokens"] for body in fields} == {TOKENS}
    assert all(body["ignore_eos"] for body in fields)
    assert len({body["seed"] for body in fields}) == 20
    assert 1 < len({body["prompt"] for body in fields}) < 20
