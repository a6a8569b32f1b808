"""Health, readiness, version, models and metrics."""

from __future__ import annotations

import openai
import pytest

from tests.requests import complete
from tests.servers import Served


def test_service_endpoints(served: Served) -> None:
    assert served.http.get("/health").json() == {"status": "ok"}
    assert served.http.get("/ready").json() == {"status": "ready"}
    assert served.http.get("/version").json()["version"]
    assert served.client.models.retrieve(served.model).id == served.model
    with pytest.raises(openai.NotFoundError):
        served.client.models.retrieve("other")
    complete(served, speculation={"drafter": "trigram"})
    metrics = served.http.get("/metrics").text
    assert 'outrider_requests_total{endpoint="/v1/completions",status="200"}' in metrics
    assert 'outrider_draft_tokens_total{drafter="trigram"}' in metrics
