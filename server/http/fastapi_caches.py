"""FastAPI remembers the functions of routes in caches, which would keep the endpoints of an application that is gone."""

from __future__ import annotations

from fastapi.dependencies import models


def forget_routes() -> None:
    """Empties these caches."""
    for each in vars(models).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
