"""In every format of weights and caches, drafts and company change no answer of the real model.

float32 is in test_equality.py, beside the comparison with transformers.
"""

from collections.abc import Iterator

import httpx
import pytest

from outrider.models import smollm2
from tests.integration.real.questions import SAMPLING, Comparison
from tests.servers import Served, serving

FORMATS = {
    "blocks of the file": (),
    "bfloat16": ("--model.dtype", "bfloat16"),
    "int8": ("--model.quantize", "int8"),
    "int4": ("--model.quantize", "int4"),
    "int8 cache": ("--model.kv_dtype", "int8"),
    "fp8 cache": ("--model.kv_dtype", "fp8"),
}
# The file's blocks are what a user serves first, so `make test` has them, too.
CASES = [pytest.param(name, marks=() if name == "blocks of the file" else pytest.mark.slow) for name in FORMATS]


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, file: str) -> Iterator[Served]:
    # With a fixed number of nodes, no costs are measured at the start.
    with serving("--model", smollm2.NAME, "--speculation.max_nodes", "12", *FORMATS[request.param]) as server:
        yield server


def test_a_rows_bits_depend_on_its_text_alone(served: Served) -> None:
    assert httpx.get(f"{served.url}/version").json()["invariant_rows"] == "on, by construction"


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_and_company_change_no_answer(served: Served, sampling: str) -> None:
    assert Comparison(served).check_company(sampling) > 0
