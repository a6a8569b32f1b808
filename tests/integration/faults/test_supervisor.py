"""A worker that crashes or stalls is replaced: its running requests end with an error, queued ones are served."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.requests import ENDLESS, complete, streaming, text
from tests.servers import Served, worker_of


@pytest.mark.slow
@pytest.mark.parametrize("cause", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_is_replaced(crowded: Served, cause: signal.Signals) -> None:
    before = text(complete(crowded, max_tokens=8))
    worker = worker_of(crowded)
    with ThreadPoolExecutor() as pool:
        with streaming(crowded, **ENDLESS) as lines:
            waiting = pool.submit(complete, crowded, max_tokens=8)
            os.kill(worker, cause)
            rest = [line for line in lines if line]
        assert '"error"' in rest[-1] and "lost" in rest[-1]
        assert text(waiting.result(60)) == before
    assert worker_of(crowded) != worker
    assert crowded.http.get("/ready").json() == {"status": "ready"}
