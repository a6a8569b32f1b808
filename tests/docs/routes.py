"""The application's routes and the fields of their bodies."""

import re
from functools import cache
from typing import Any

from outrider.server.app import create_app
from outrider.server.settings import Settings
from outrider.verify.tokenizer import load_tokenizer


@cache
def application() -> Any:
    settings = Settings()
    return create_app(settings, load_tokenizer(settings.model.path, trust_remote_code=False))


@cache
def routes() -> frozenset[tuple[str, str]]:
    """All pairs of a method and a path template."""
    paths = application().openapi()["paths"]
    pairs = {(method.upper(), path) for path, operations in paths.items() for method in operations}
    return frozenset(pairs | {("GET", "/openapi.json")})


def matches(template: str, path: str) -> bool:
    """Whether a path or another template matches the template."""
    return re.fullmatch(re.sub(r"\\\{[^/]+\\\}", r"[^/]+", re.escape(template)), path) is not None


def fields(path: str, method: str = "post") -> set[str]:
    """The fields of an endpoint's body."""
    description = application().openapi()
    body = description["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return set(description["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"])
