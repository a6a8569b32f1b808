"""The page of Prometheus metrics: on which port it is, and who may read it."""

import hmac
import re
from collections.abc import Awaitable, Callable, Iterable

from fastapi import FastAPI, Request, Response

from outrider.server.http import errors
from outrider.server.http.auth import digest, key_digest, wrong_key
from outrider.server.http.errors import APIError
from outrider.server.http.origins import OriginGuard
from outrider.server.settings import Settings

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Matches the name of a sample and the bracket of its labels.
SAMPLE = re.compile(rb"^([\w:]+)(?:\{|(?= ))", re.MULTILINE)


class MetricsPage:
    """The page. It shows how other clients' requests are answered, so API keys do not open it."""

    def __init__(self, settings: Settings, read: Callable[[], Awaitable[bytes]]) -> None:
        """`read` returns the metrics in Prometheus' text format."""
        key = settings.metrics.key
        self._read = read
        self._digest = None if key is None else digest(key.get_secret_value())
        self._refused = bool(settings.auth.keys) and key is None and settings.metrics.port is None

    async def response(self, request: Request) -> Response:
        """The response to a request. Raises APIError if the client may not read the page."""
        if self._refused:
            message = "A server with API keys shows its metrics only if metrics.port or metrics.key is set; set one of them."
            raise APIError(403, message, code="metrics_not_available")
        if self._digest is not None:
            sent = key_digest(request.headers.get("authorization"), request.headers.get("x-api-key"))
            if not hmac.compare_digest(sent, self._digest):
                raise wrong_key()
        return Response(await self._read(), media_type=MEDIA_TYPE)


def create_metrics_app(settings: Settings, page: MetricsPage) -> FastAPI:
    """The application of `metrics.port`."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    errors.install(app)
    has_key = settings.metrics.key is not None
    app.add_middleware(OriginGuard, settings=settings.server, has_keys=has_key, address=settings.metrics.host)
    add_metrics_route(app, page)
    return app


def add_metrics_route(app: FastAPI, page: MetricsPage) -> None:

    @app.get("/metrics")
    async def metrics(http: Request) -> Response:
        return await page.response(http)


def merged(pages: Iterable[tuple[str, bytes]], label: str) -> bytes:
    """Pages in Prometheus' text format as one. Their samples get a `label` with the page's name, except those without one."""
    families: dict[bytes, list[bytes]] = {}
    for name, page in pages:
        for family in re.split(rb"^(?=# HELP )", page, flags=re.MULTILINE):
            if family:
                help_line, type_line, samples = family.split(b"\n", 2)
                head = help_line + b"\n" + type_line + b"\n"
                families.setdefault(head, []).append(labelled(samples, label, name) if name else samples)
    return b"".join(head + b"".join(bodies) for head, bodies in families.items())


def labelled(samples: bytes, label: str, value: str) -> bytes:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    def add(name: re.Match[bytes]) -> bytes:
        first = name[1] + f'{{{label}="{escaped}"'.encode()
        return first + (b"," if name[0].endswith(b"{") else b"}")

    return SAMPLE.sub(add, samples)
