"""The playground's files, which are served as they are in `static`.

Promises that a browser runs no script and no style but these files, and connects the page to this server only. Knows nothing
about the API, which the page uses like any other client.
"""

from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).parent / "static"
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",  # pasted pictures
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no function that takes HTML or code as text works
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # ask whether the file has changed: an update of the server changes it
}


def new_router() -> APIRouter:
    """The routes of the page, which are no part of the API's description."""
    router, files = APIRouter(include_in_schema=False), StaticFiles(directory=STATIC)

    async def respond(http: Request, path: str) -> Response:
        response = await files.get_response(path, http.scope)
        response.headers.update(HEADERS)
        return response

    @router.get("/")
    async def page(http: Request) -> Response:
        return await respond(http, "index.html")

    @router.get("/page/{path:path}")
    async def file(http: Request, path: str) -> Response:
        return await respond(http, path)

    return router
