"""Requests of the overload have answers of one length, each with its own seed."""

from __future__ import annotations

from bench.overload import TOKENS, request_fields


def test_requests_differ_by_seed_and_not_by_length() -> None:
    fields = [request_fields("m", number) for number in range(20)]
    assert {each["max_tokens"] for each in fields} == {TOKENS}
    assert all(each["ignore_eos"] for each in fields)
    assert len({each["seed"] for each in fields}) == 20
    assert 1 < len({each["prompt"] for each in fields}) < 20
