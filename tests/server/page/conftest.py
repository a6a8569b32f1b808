"""One Chromium, driven by Playwright, for the tests of this folder that use it; both are optional."""

import json
import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from outrider import models
from outrider.models import packaged
from tests.hub import installed
from tests.servers import Served, serving

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks the tests that use the browser."""
    if "browser" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    executable = next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("Chromium is not installed")
    with sync_api.sync_playwright() as driver:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium has none for root
        browser = driver.chromium.launch(executable_path=executable, args=sandbox)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    """SmolLM2 and the embedded model, which are loaded when they are asked for."""
    installed()
    paths = json.dumps([packaged.SMOLLM2, str(models.TARGET)])
    with serving("--models.paths", paths, "--speculation.max_nodes", "16") as server:
        yield server
