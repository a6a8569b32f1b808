"""In every format of weights and caches, at the default settings, drafts and company change no answer of the real model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from outrider.models import smollm2
from tests.integration.real.questions import CAPITAL, QUESTIONS, SAMPLING
from tests.integration.real.test_equality import answer
from tests.servers import Served, serving

NODES = ("--speculation.max_nodes", "12")  # so that no costs are measured
FORMATS = {
    "blocks of the file": (),
    "bfloat16": ("--model.dtype", "bfloat16"),
    "int8": ("--model.quantize", "int8"),
    "int4": ("--model.quantize", "int4"),
    "int8 cache": ("--model.kv_dtype", "int8"),
}
# The file's blocks are what a user serves first, so `make test` has them, too.
CASES = [pytest.param(name, marks=() if name == "blocks of the file" else pytest.mark.slow) for name in FORMATS]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, file: str) -> Iterator[Served]:
    with serving("--model", smollm2.NAME, *NODES, *FORMATS[request.param], "--scheduling.max_active", "4") as server:
        yield server


def test_a_rows_bits_depend_on_its_text_alone(served: Served) -> None:
    assert httpx.get(f"{served.url}/version").json()["invariant_rows"] == "on, by construction"


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_and_company_change_no_answer(served: Served, sampling: str) -> None:
    questions = (CAPITAL, *QUESTIONS)
    plain = [answer(served, "none", question, sampling)[0] for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        found = list(pool.map(lambda question: answer(served, "fusion", question, sampling), questions))
    assert [tokens for tokens, _ in found] == plain
    assert sum(sum(report["accepted_tokens"].values()) for _, report in found) > 0
