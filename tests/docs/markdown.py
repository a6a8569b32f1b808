"""The documentation pages, their code blocks, inline code, links and headings; the application's routes and their fields."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from outrider.server.app import create_app
from outrider.server.settings import Settings
from outrider.verify.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "models/embedded/README.md")
PAGE_NAMES = tuple(page.relative_to(ROOT).as_posix() for page in PAGES)


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    return [Block(page, *match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", read(page), flags=re.M | re.S)]


def prose(page: str) -> str:
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)


def inline_code(page: str) -> list[str]:
    """The contents of all `code` spans outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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
    return re.fullmatch(re.sub(r"\\\{[^/]+\\\}", r"[^/]+", re.escape(template)), path) is not None


def fields(path: str, method: str = "post") -> set[str]:
    description = application().openapi()
    body = description["paths"][path][method]["requestBody"]["content"]["application/json"]["schema"]
    return set(description["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"])
