"""Start-up times: a server counts as available once its endpoint answers with status 200."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from bench.startup import seconds_until


def test_polling_ends_with_the_first_success() -> None:
    statuses = [503, 503, 200, 500]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses.pop(0))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        started = time.perf_counter()
        assert 0 < seconds_until(f"http://127.0.0.1:{server.server_port}/ready", started) < 60
        server.shutdown()
        thread.join()
    assert statuses == [500]
