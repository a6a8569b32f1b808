"""What a run must show."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.__main__ import failed_criteria
from tests.soak.clients import Record

GOOD: dict[str, Any] = {
    "wrong_answers": [],
    "worker_restarts": [1.0, 0.0],
    "health_ms": {"p99": 20.0},
    "health_failures": 0,
    "memory": {"worker 1": {"early_mb": 100.0, "late_mb": 105.0, "ratio": 1.05}},
}


def record() -> Record:
    return Record(failed_at=[300.1, 301.0], killed_at=[300.0])


def test_requests_of_a_killed_worker_may_fail() -> None:
    assert failed_criteria(GOOD, record()) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"wrong_answers": ["4: [1] for [2]"]}, "wrong: 4: [1] for [2]"),
        ({"worker_restarts": [1.0, 1.0]}, "replaced"),
        ({"health_ms": {"p99": 900.0}}, "/health took 900.0 ms"),
        ({"health_failures": 2}, "failed 2 times"),
        ({"memory": {"worker 1": {"early_mb": 100.0, "late_mb": 120.0, "ratio": 1.2}}}, "grew from 100.0 to 120.0 MB"),
    ],
)
def test_each_failed_criterion_is_a_sentence(change: dict[str, Any], sentence: str) -> None:
    [failed] = failed_criteria(GOOD | change, record())
    assert sentence in failed


def test_a_request_that_is_lost_without_a_kill_is_a_failure() -> None:
    [failed] = failed_criteria(GOOD, Record(failed_at=[299.0, 300.1], killed_at=[300.0]))
    assert failed.startswith("1 requests failed")
