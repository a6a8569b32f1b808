"""What load and soak make of what they saw, and that hostile bodies are as odd as they claim."""

from __future__ import annotations

import json
import random

import pytest

from bench.hostile import VALID, encode, mutated, nested
from bench.http.client import Outcome, quantiles
from bench.http.load import Load, figures
from bench.soak import Sample, growth


def test_quantiles_are_of_the_values() -> None:
    assert quantiles([]) == {}
    assert quantiles([number / 1000 for number in range(1, 101)]) == {"p50": 51.0, "p90": 91.0, "p99": 100.0, "max": 100.0}


def test_goodput_counts_what_came_in_time() -> None:
    load = Load((), 10.0, 8, 0.0, "fusion", 0.0, target_ms=100.0)
    seen = [
        Outcome(200, 0.0, 1.0, 0.05, [0.1], [1, 2]),
        Outcome(200, 0.0, 2.0, 0.2, [0.3], [1]),
        Outcome(200, 0.0, 1.0, 0.01, error="lost"),
        Outcome(429, 0.0, 0.01),
    ]
    found = figures(load, "open", 2.0, seen, 10.0)
    assert (found["answers_per_second"], found["goodput_per_second"], found["tokens_per_second"]) == (0.2, 0.1, 0.3)
    assert (found["statuses"], found["errors"]) == ({"200": 3, "429": 1}, 1)
    assert found["end_to_end_ms"]["max"] == 2000.0


def test_growth_is_of_the_last_process_once_it_has_settled() -> None:
    first = [Sample(float(at), 1, 500.0) for at in range(0, 100, 5)]
    last = [Sample(100.0 + at, 2, 100.0 + (at < 60) * 50 + (at > 150) * 10) for at in range(0, 200, 5)]
    assert growth(first + last) == {"early_mb": 100.0, "late_mb": 110.0, "ratio": 1.1}


def test_bodies_as_careless_clients_write_them() -> None:
    assert encode({"a": nested(3), "b": float("nan")}) == b'{"a": [[[]]], "b": NaN}'
    assert encode({"a": "\ud800"}) == b'{"a": "\\ud800"}'
    lots = random.Random(0)
    bodies = [mutated(lots, path, "m") for path in VALID for _ in range(50)]
    readable = 0
    for body in bodies:
        try:
            json.loads(body)
            readable += 1
        except (ValueError, RecursionError):
            pass
    assert len(bodies) // 2 < readable < len(bodies)


@pytest.mark.parametrize("status", [0, 200, 429, 503])
def test_an_outcome_is_an_answer_only_if_it_is_whole(status: int) -> None:
    assert Outcome(status).answered == (status == 200)
    assert not Outcome(status, error="lost").answered
