"""Names what a request has and the server leaves out or does not enforce, in a header of the response and in the log."""

import logging
import re
from collections.abc import Sequence

from fastapi import Request, Response

HEADER = "x-outrider-ignored"
# The header has at most this many names.
MAX_IGNORED = 32
# Matches a name: the field, and words that the client could choose freely, such as the type of its value or a path in a schema.
NAME = re.compile(r"(?=.{1,200}$)[a-z_]+(?:\.[A-Za-z0-9_-]{1,64})+")
log = logging.getLogger("outrider.requests")


def report_ignored(http: Request, response: Response, names: Sequence[str]) -> Response:
    """The response, whose header names what was left out. `names` are fields with types or places: "tools.web_search"."""
    if names:
        known = dict.fromkeys(name if NAME.fullmatch(name) else f"{name.partition('.')[0]}.unknown" for name in names)
        response.headers[HEADER] = ", ".join(list(known)[:MAX_IGNORED])
        fields = ", ".join(dict.fromkeys(name.partition(".")[0] for name in known))  # the types are the client's words
        log.info("ignored", extra={"fields": {"request_id": http.state.request_id, "ignored": fields}})
    return response
