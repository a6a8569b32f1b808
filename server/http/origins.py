"""Defence against web pages: host names and origins that a server without keys answers.

Any page that is open in a browser on this machine can send requests to the server. The browser hides the responses, unless the
page has rebound its own host name to the server's address (DNS rebinding); such a request names a foreign host. Requests from a
foreign origin are refused as well, because browsers send simple ones without a preflight. The request for a picture or a script
has no origin, but browsers mark it by `Sec-Fetch-Site`, or, if the server's address is not this machine's, by `Referer` only.
From a foreign page, it may read what needs no key, as a link may. A page may suppress the `Referer`: then a GET is answered,
which changes nothing and loads no model, and whose answer the browser hides.
"""

import ipaddress
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.http.auth import is_open
from outrider.server.http.errors import APIError
from outrider.server.settings import Server

ANY = "*"
# Where a request comes from that no foreign page has sent: the server's own page, or the user.
OWN_SITES = ("same-origin", "none")


class OriginGuard:
    """ASGI middleware: answers requests for a foreign host with a 421, and requests from a foreign origin with a 403.

    With `has_keys`, origins are not checked: a browser adds no key to the requests of a page.
    """

    def __init__(self, app: ASGIApp, settings: Server, has_keys: bool, address: str | None = None) -> None:
        self._app = app
        default = (ANY,) if has_keys else ()
        names = default if settings.allowed_hosts is None else settings.allowed_hosts
        self._hosts = frozenset(name.lower() for name in (*names, "localhost", address or settings.host))
        self._origins: Collection[str] = (ANY,) if has_keys else settings.cors_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            error = self.error(Headers(scope=scope), is_open(scope["method"], scope["path"]))
            if error is not None:
                return await error.response(scope)(scope, receive, send)
        await self._app(scope, receive, send)

    def error(self, headers: Headers, is_open: bool = False) -> APIError | None:
        """The error response to a request with these headers; None if they are allowed. `is_open`: it needs no key."""
        hosts = headers.getlist("host")
        if not all(self._is_allowed(host) for host in hosts):
            message = "This host name is not allowed; use an IP address, or add the name to server.allowed_hosts."
            return APIError(421, message, code="host_not_allowed")
        own = [host for host in hosts if host]
        origins = headers.getlist("origin")
        sites = headers.getlist("sec-fetch-site")
        pages = [] if sites else ["/".join(page.split("/")[:3]) for page in headers.getlist("referer")]
        is_foreign = not origins and (
            any(site not in OWN_SITES for site in sites) or not all(self._is_own(page, own) for page in pages)
        )
        if (is_foreign and not is_open and ANY not in self._origins) or not all(
            self._is_own(origin, own) for origin in origins
        ):
            message = "Requests from this web page's origin are not allowed; add the origin to server.cors_origins."
            return APIError(403, message, code="origin_not_allowed")
        return None

    def _is_own(self, origin: str, own: Collection[str]) -> bool:
        """Whether an origin is allowed, or that of one of the server's `own` hosts."""
        return ANY in self._origins or origin in self._origins or origin.partition("://")[2] in own

    def _is_allowed(self, host: str) -> bool:
        """Whether the name or address in a Host header is allowed."""
        name = (host[1:].partition("]") if host.startswith("[") else host.partition(":"))[0].lower()
        return ANY in self._hosts or name in self._hosts or is_address(name)


def is_address(name: str) -> bool:
    """Whether this is an IP address, which no page can rebind."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
