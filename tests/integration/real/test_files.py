"""Of the files that models/*-Q4_K_M.txt name, drafts and company change no answer. `make models` fetches those that CI has."""

from collections.abc import Iterator

import pytest

from outrider.models import packaged
from tests.integration.real.questions import SAMPLING, Comparison
from tests.servers import Served, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=sorted({*packaged.NAMES} - {packaged.SMOLLM2}))  # SmolLM2 has tests of its own
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    file = packaged.place(request.param)
    if not file.is_file():
        pytest.skip(f"{file} is not there; fetch it with `outrider pull {request.param}`")
    with serving("--model", str(file)) as server:
        yield server


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_and_company_change_no_answer(served: Served, sampling: str) -> None:
    assert served.http.get("/version").json()["invariant_rows"] == "on, by construction"
    assert Comparison(served, as_chat=False).check_company(sampling) > 0
