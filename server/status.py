"""Whether the server of one model works, is ready, and what it serves."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from outrider.server.engine.interface import EngineLike


def add_status_routes(app: FastAPI, engine: EngineLike) -> None:
    """/health, /ready and /version, which need no key."""

    @app.get("/health")
    @app.get("/v1/health")  # llama-server's
    async def health() -> Response:
        if engine.failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "detail": engine.failure}, 503)

    @app.get("/ready")
    async def ready() -> Response:
        if engine.ready:
            return JSONResponse({"status": engine.state})
        return JSONResponse({"status": engine.state, "detail": engine.failure}, 503)

    @app.get("/version")
    async def app_version() -> dict[str, Any]:
        versions: dict[str, Any] = {"version": version("outrider")}
        if engine.info is not None:
            info = engine.info
            versions |= {"dtype": info.dtype, "weight_bits": info.weight_bits, "kv_dtype": info.kv_dtype}
            versions["invariant_rows"] = info.invariance
            versions["memory"] = msgspec.to_builtins(info.memory)
            if info.kernels:
                versions["kernels"] = info.kernels
            if info.alone:
                versions["rows_in_one_thread"] = info.alone
        return versions
