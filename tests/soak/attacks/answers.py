"""Reads responses and flags bad ones: server errors, tracebacks, and redirects to a forged host."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from tests.soak.attacks.connections import FOREIGN

HANG_SECONDS = 60.0
LOST = "worker_unavailable"  # the error code of a request whose worker was killed
STREAM_ERROR = re.compile(r'^data: (\{.*"error".*\})$', re.M)
KEPT_CHARACTERS = 2000  # of an answer, at its end


@dataclass(frozen=True)
class Answer:
    """An answer, or why there is none."""

    status: str  # code, "hangs", or the name of the client's error
    code: str = ""  # of the error in the body or in the stream
    kind: str = ""  # the error's type
    text: str = ""  # the end
    location: str = ""

    def fault(self, kills: bool) -> str | None:
        """What is wrong with it, if anything. With `kills`, requests may be lost with their worker."""
        if self.status == "hangs":
            return f"no answer within {HANG_SECONDS:g} s"
        if FOREIGN in self.location:
            return f"redirected to {self.location}"
        if "Traceback" in self.text:
            return "a traceback in the answer"
        failed = self.status.startswith("5") or self.kind in ("server_error", "service_unavailable_error")
        if failed and not (kills and self.code == LOST):
            return f"{self.status} {self.code}: {self.text[:200]}"
        return None


async def read(
    client: httpx.AsyncClient, method: str, path: str, on_data: Callable[[], Any] = lambda: None, **options: Any
) -> Answer:
    """Sends a request and reads the whole answer; calls `on_data` at each part."""
    end = ""
    try:
        async with client.stream(method, path, timeout=HANG_SECONDS, **options) as response:
            async for part in response.aiter_bytes():
                on_data()
                end = (end + part.decode("utf-8", "replace"))[-KEPT_CHARACTERS:]
    except httpx.TimeoutException:
        return Answer("hangs")
    except (httpx.HTTPError, httpx.InvalidURL) as failure:
        return Answer(type(failure).__name__)
    error = stated_error(end)
    return Answer(
        str(response.status_code),
        str(error.get("code") or ""),
        str(error.get("type") or ""),
        end,
        response.headers.get("location", ""),
    )


def stated_error(text: str) -> dict[str, Any]:
    """The error in a body or in a stream's last events; empty if there is none."""
    found = STREAM_ERROR.findall(text)
    try:
        error = json.loads(found[-1] if found else text).get("error")
    except (ValueError, AttributeError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {}
