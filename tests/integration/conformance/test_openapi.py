"""Generated requests, valid and invalid by the API's description: no 500, no hang, no undocumented status.

`OUTRIDER_API_EXAMPLES=200` generates more examples per operation.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import status_code_conformance

from tests.servers import Served, serving

EXAMPLES = int(os.environ.get("OUTRIDER_API_EXAMPLES", "8"))
SECONDS = 60


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """A server whose context is so small that every answer is short."""
    with serving("--model.dtype", "float32", "--model.context_tokens", "64") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_any_request(server: Served, mode: GenerationMode) -> None:
    """Valid (positive) and invalid (negative) requests; half of the bodies name the served model."""
    described: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in described.get_all_operations()]
    assert len(operations) >= 14
    for operation in operations:

        @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            if isinstance(case.body, dict) and isinstance(case.body.get("model"), str) and len(case.body["model"]) % 2 == 0:
                case.body["model"] = server.model
            case.call_and_validate(checks=[not_a_server_error, status_code_conformance], timeout=SECONDS)

        if mode is GenerationMode.POSITIVE or operation.body:  # a path alone cannot be invalid
            send()
    assert server.process.poll() is None
