"""The page's files, self-contained and without inline code, and its routes."""

import hashlib
import re
from typing import get_args

import pytest

from outrider.drafters.interface import Source
from outrider.drafters.options import DrafterName
from outrider.server.page.routes import HEADERS, STATIC
from tests.server.fakes import FakeEngine, app_with, fetch

UPLOT = {  # of version 1.6.32 in the npm registry; the script gets one more line, which makes it a module
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}
DRAFTS = (STATIC / "drafts.html").read_text()


@pytest.mark.parametrize("name", ["index.html", "drafts.html"])
def test_a_page_has_no_inline_code(name: str) -> None:
    inline = r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]* src=)"
    assert not re.search(inline, (STATIC / name).read_text())


@pytest.mark.parametrize("name", sorted(path.name for path in STATIC.glob("*.js")))
def test_text_is_never_html_or_code(name: str) -> None:
    unsafe = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|setHTMLUnsafe|DOMParser|\beval\(|new Function"
        r"|localStorage|sessionStorage|cookie"
    )
    assert not re.search(unsafe, (STATIC / name).read_text())


def test_uplot_is_the_published_one_with_its_licence() -> None:
    for name, expected in UPLOT.items():
        data = (STATIC / "vendor" / name).read_bytes().removesuffix(b"export default uPlot;\n")
        assert hashlib.sha256(data).hexdigest() == expected
    assert "MIT License" in (STATIC / "vendor" / "uplot.LICENSE").read_text()
    assert "(v1.6.32)" in (STATIC / "vendor" / "uplot.js").read_text()[:100]


def test_every_drafter_can_be_chosen() -> None:
    choices = re.search(r'<select name="drafter">(.*?)</select>', DRAFTS, re.DOTALL)
    assert choices and set(re.findall(r"<option>([\w-]+)</option>", choices[1])) == set(get_args(DrafterName))


def test_every_source_has_a_colour() -> None:
    style, chat = ((STATIC / name).read_text() for name in ("style.css", "chat.css"))
    for source in Source:
        if source is not Source.NONE:
            assert f".source-{source.label} {{ --source: var(--{source.label}); }}" in style
            assert re.search(rf"--{source.label}: light-dark\(#[0-9a-f]{{6}}, #[0-9a-f]{{6}}\);", style)
            assert f"::highlight(draft-{source.label}) {{ background: color-mix(in srgb, var(--{source.label})" in chat


def test_every_file_has_the_headers() -> None:
    app = app_with(FakeEngine())
    files = {f"/page/{path.relative_to(STATIC).as_posix()}": path for path in STATIC.rglob("*") if path.is_file()}
    for path, file in {"/": STATIC / "index.html", **files}.items():
        response = fetch(app, "GET", path)
        assert response.status_code == 200 and response.content == file.read_bytes(), path
        assert {name: response.headers[name] for name in HEADERS} == HEADERS


def test_the_page_needs_no_key_and_the_api_does() -> None:
    app = app_with(FakeEngine("a"), auth__keys={"alice": "a-key-of-some-length"})
    found = [fetch(app, "GET", path).status_code for path in ("/", "/page/chat.js", "/v1/models", "/pages")]
    assert found == [200, 200, 401, 401]
    assert fetch(app, "POST", "/").status_code == 401


def test_the_page_can_be_turned_off() -> None:
    app = app_with(FakeEngine(), server__page=False)
    assert [fetch(app, "GET", path).status_code for path in ("/", "/page/chat.js", "/health")] == [404, 404, 200]
