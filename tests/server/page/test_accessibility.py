"""Both pages by axe, which is fetched from the npm registry."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.requests import PROMPT
from tests.server.page.chromium import DESKTOP, EXECUTABLE, PHONE, ask, chatting, launched, said, submit, visit
from tests.server.page.test_browser import DRAFTS
from tests.servers import Served

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")]
AXE = "axe-core@4.14.1"
VIOLATIONS = (
    """async () => (await axe.run()).violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html}`))"""
)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its script."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("axe")
    if npm is None:
        pytest.skip("npm is not installed")
    command = [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", AXE]
    if subprocess.run(command, capture_output=True, timeout=60).returncode:
        pytest.skip("the npm registry does not give axe-core")
    return Path(folder / "node_modules" / "axe-core" / "axe.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(sync_api) as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_the_chat_is_accessible(browser: Any, served: Served, axe: str, scheme: str, viewport: dict[str, int]) -> None:
    with chatting(browser, served.url, 24, viewport, color_scheme=scheme) as page:
        page.evaluate(axe)
        assert page.evaluate(VIOLATIONS) == []
        page.click("#overlay")
        ask(page, "```python\nprint(1)\n```")
        page.click("text=Regenerate")
        page.locator("article.assistant >> text='2 of 2'").wait_for()
        assert page.evaluate(VIOLATIONS) == []
        page.click("text=Edit")
        assert page.evaluate(VIOLATIONS) == []
        page.click("#open-settings")
        assert page.evaluate(VIOLATIONS) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_view_of_drafts_is_accessible(browser: Any, served: Served, axe: str, scheme: str) -> None:
    with visit(browser, served.url + DRAFTS, color_scheme=scheme) as page:
        submit(page, PROMPT, max_tokens="20")
        said(page, "Done")
        page.locator("#transcript .token.drafted").first.click()
        page.click("#server summary")
        page.get_by_role("row", name="Cache used").wait_for()
        page.evaluate(axe)
        assert page.evaluate(VIOLATIONS) == []
