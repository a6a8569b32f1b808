"""What the documentation names exists, it describes the API completely, and its generated pages are up to date."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.drafters.options import NAMES
from outrider.server.settings.reference import sections, setting_names
from tests.docs.generated import API, DEFAULT_YAML, ROOFLINE, SETTINGS, api, default_yaml, roofline, settings
from tests.docs.markdown import PAGE_NAMES, ROOT, anchors, inline_code, links, prose, read
from tests.docs.routes import fields, matches, routes

SECTIONS = {section.name for section in sections()}
TOP_SECTIONS = {name.partition(".")[0] for name in SECTIONS}
FOLDERS = ("server", "drafters", "engines", "verify", "bench", "models", "configs", "docker", "docs", "tests")


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_settings_exist(page: str) -> None:
    for code in inline_code(page):
        name = code.removeprefix("--").partition(" ")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", name) and name.partition(".")[0] in TOP_SECTIONS:
            assert name in setting_names() or name in SECTIONS or f"{name}.NAME" in SECTIONS, f"{page}: {name}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_environment_variables_are_settings(page: str) -> None:
    for variable in re.findall(r"OUTRIDER_\w+__\w+", read(page)):
        assert variable.removeprefix("OUTRIDER_").lower().replace("__", ".") in setting_names(), f"{page}: {variable}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_endpoints_exist(page: str) -> None:
    for method, path in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", read(page)):
        assert any(method == m and matches(template, path) for m, template in routes()), f"{page}: {method} {path}"


def test_all_endpoints_are_documented() -> None:
    items = [line.partition(": ")[0] for line in read("docs/api.md").splitlines() if line.startswith("- `")]
    named = [found for item in items for found in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", item)]
    for method, template in routes():
        assert any(method == m and matches(template, path) for m, path in named), (method, template)


def documented_fields(*headings: str) -> set[str]:
    """The fields that the lists below these headings of docs/api.md and docs/editors.md describe."""
    parts = re.split(r"^#+ (.+)$", prose("docs/api.md") + prose("docs/editors.md"), flags=re.M)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    items = [item for heading in headings for item in re.findall(r"^- ((?:`\w+`[,\s]*)+):\s", texts[heading], flags=re.M)]
    return {name for item in items for name in re.findall(r"`(\w+)`", item)}


@pytest.mark.parametrize(
    ("path", "headings"),
    [
        ("/v1/chat/completions", ("Generation", "Chat")),
        ("/v1/completions", ("Generation", "Completions")),
        ("/v1/responses", ("Responses",)),
        ("/v1/messages", ("Messages",)),
        ("/infill", ("Generation", "Editors")),
    ],
)
def test_all_fields_are_documented(path: str, headings: tuple[str, ...]) -> None:
    assert documented_fields(*headings) == fields(path)


def test_all_drafters_are_documented() -> None:
    assert set(re.findall(r"^- `([a-z-]+)`: ", read("docs/drafters.md"), flags=re.M)) == set(NAMES)


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_files_exist(page: str) -> None:
    for code in inline_code(page):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", code):
            assert list(ROOT.glob(code.rstrip("/"))), f"{page}: {code}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_links_resolve(page: str) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"


FILES = [(DEFAULT_YAML, lambda _: default_yaml()), (SETTINGS, settings), (API, api), (ROOFLINE, roofline)]


@pytest.mark.parametrize(("file", "generated"), FILES, ids=lambda each: getattr(each, "name", ""))
def test_a_file_is_up_to_date(file: Path, generated: Callable[[str], str]) -> None:
    assert file.read_text() == generated(file.read_text()), "run python -m tests.docs.generated"
