"""A server that answers by path, in the place of one that cannot be run here."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

# By path: the status, the body, and pairs of a header's name and value.
Answers = dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    """Answers by path."""

    answers: ClassVar[Answers]
    keys: ClassVar[list[str | None]]

    def do_GET(self) -> None:
        self.keys.append(self.headers["Authorization"])
        status, body, *headers = self.answers.get(self.path, (404, "no such page"))
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.send_response(status)
        for name, value in (("Content-Length", str(len(body.encode()))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def answering(answers: Answers, keys: list[str | None] | None = None) -> Iterator[str]:
    handler = type("Answering", (Handler,), {"answers": answers, "keys": [] if keys is None else keys})
    with handling(handler) as url:
        yield url


@contextmanager
def handling(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """A server whose requests are handled so."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
