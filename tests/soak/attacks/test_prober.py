"""The prober measures a server, and counts the probes that a blocked server kept from being made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from tests.soak.attacks.prober import probe, probing, with_missed


@contextmanager
def answering(status: int) -> Iterator[HTTPServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Writes nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_a_probe_times_an_answer(status: int, healthy: bool) -> None:
    with answering(status) as server:
        seconds, ok = probe("127.0.0.1", server.server_port)
    assert seconds > 0 and ok is healthy


def test_a_server_that_is_gone_is_not_healthy() -> None:
    with answering(200) as server:
        port = server.server_port
    assert probe("127.0.0.1", port)[1] is False


def test_a_blocked_server_counts_for_each_probe_that_it_delayed() -> None:
    assert with_missed(0.01, 0.05) == [0.01]
    assert with_missed(0.2, 0.05) == pytest.approx([0.2, 0.15, 0.1, 0.05])


def test_the_measurements_come_from_another_process() -> None:
    with answering(200) as server, probing(f"http://127.0.0.1:{server.server_port}") as measured:
        pass
    assert measured["failures"] == 0 and isinstance(measured["seconds"], list)
