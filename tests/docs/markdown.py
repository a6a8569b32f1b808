"""The documentation pages, and their code blocks, inline code, links and headings."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "models" / "embedded" / "README.md",
)
PAGE_NAMES = tuple(page.relative_to(ROOT).as_posix() for page in PAGES)


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    page: str
    language: str
    text: str


@cache
def read(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """All fenced code blocks of a page."""
    return [Block(page, *match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", read(page), flags=re.M | re.S)]


def prose(page: str) -> str:
    """The page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.M | re.S)


def inline_code(page: str) -> list[str]:
    """The contents of all `code` spans outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", prose(page))


def links(page: str) -> list[str]:
    """The targets of all links."""
    return re.findall(r"\]\(([^)\s]+)\)", prose(page))


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
