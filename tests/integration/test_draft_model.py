"""A server with a draft model: its drafters one by one and concurrently; a server without one does not start with them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider import models
from outrider.drafters.options import NEED_A_MODEL
from outrider.server.settings import SettingsError, load_settings
from tests.requests import body, complete
from tests.servers import Served, serving
from tests.slow import mostly_slow

DRAFTERS = ("none", "fusion", *NEED_A_MODEL)
CONFIG = Path(__file__).parents[2] / "configs" / "pearl.yaml"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """Whose `pearl` drafts with its model in every step: otherwise that depends on measured times."""
    flags = ("--speculation.pearl.only_if_worth", "false", "--scheduling.max_active", "3")
    with serving("--config", str(CONFIG), "--draft-model", str(models.DRAFT), *flags) as server:
        yield server


FIELDS: list[dict[str, object]] = [{"temperature": 0}, {"temperature": 0.9, "seed": 6}, {"stop": ["return", ")"]}]


@pytest.mark.parametrize("fields", mostly_slow(FIELDS, FIELDS[1]), ids=str)
def test_answers_do_not_depend_on_the_drafter(server: Served, fields: dict[str, object]) -> None:
    def answer(drafter: str) -> object:
        return complete(server, max_tokens=60, return_token_ids=True, **fields, speculation={"drafter": drafter})["choices"]

    expected = answer("none")
    with ThreadPoolExecutor() as pool:  # their steps interleave
        assert list(pool.map(answer, DRAFTERS)) == [expected] * len(DRAFTERS)


def test_a_session_is_valid_after_a_disconnect(server: Served) -> None:
    expected = complete(server, max_tokens=40)["choices"]
    for drafter in ("pearl", "draft-graph"):
        fields = body(
            server, max_tokens=900, temperature=1.2, session_id=drafter, stream=True, speculation={"drafter": drafter}
        )
        with server.http.stream("POST", "/v1/completions", json=fields) as response:
            next(response.iter_lines())
        again = complete(server, max_tokens=40, session_id=drafter, speculation={"drafter": drafter})
        assert again["choices"] == expected


@pytest.mark.parametrize("name", NEED_A_MODEL)
def test_without_a_draft_model_its_drafters_are_no_settings(name: str) -> None:
    with pytest.raises(SettingsError, match="--draft-model"):
        load_settings(None, {"speculation.drafter": name})
