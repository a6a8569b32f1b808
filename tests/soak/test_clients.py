"""Counts of the soak test, and the growth of memory."""

from __future__ import annotations

import asyncio

import pytest

from bench.http.client import Outcome
from tests.soak.clients import Sample, Soak, growth
from tests.soak.questions import Question
from tests.soak.servers import Servers

QUESTION = Question({"prompt": "x", "seed": 4}, [1, 2, 3])


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (Outcome(200, tokens=[1, 2, 3]), "right answers"),
        (Outcome(429), "refused"),
        (Outcome(200, error="the worker was replaced"), "failed"),
        (Outcome(0, error="ReadError"), "failed"),
    ],
)
def test_an_answer_is_compared_with_plain_decoding(outcome: Outcome, kind: str) -> None:
    soak = Soak(Servers([], 0), "key", [QUESTION], 10.0)
    asyncio.run(soak._check(QUESTION, outcome))
    assert soak.record.counts[kind] == 1
    assert not soak.record.wrong
    assert len(soak.record.failed_at) == (kind == "failed")


def test_a_wrong_answer_is_recorded() -> None:
    soak = Soak(Servers([], 0), "key", [QUESTION], 10.0)
    asyncio.run(soak._check(QUESTION, Outcome(200, tokens=[1, 2, 4])))
    assert soak.record.wrong == ["4: [1, 2, 4]... for [1, 2, 3]..."]


def test_growth_is_of_the_last_process_once_it_has_settled() -> None:
    first = [Sample(float(second), 1, 500.0) for second in range(0, 100, 5)]
    last = [Sample(100.0 + second, 2, 100.0 + (second < 60) * 50 + (second > 150) * 10) for second in range(0, 200, 5)]
    assert growth(first + last) == {"early_mb": 100.0, "late_mb": 110.0, "ratio": 1.1}


def test_growth_counts_from_when_the_stores_are_full() -> None:
    filling = [Sample(float(second), 1, 50.0 + second) for second in range(200)]
    full = [Sample(200.0 + second, 1, 250.0) for second in range(60)]
    assert growth(filling + full)["ratio"] > 1.1
    assert growth(filling + full, full_at=200.0)["ratio"] == 1.0
