"""Pictures that are pasted into the playground, in a real browser."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.page.chromium import EXECUTABLE, launched, said, submit, visit
from tests.server.pictures.models import picture, write_qwen
from tests.servers import Served, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = [pytest.mark.browser, pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")]

PASTE = """async (area, encoded) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], "a.png", { type: "image/png" }));
  area.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched(sync_api) as browser:
        yield browser


def test_a_pasted_picture_is_part_of_the_message(browser: Any, tmp_path: Path) -> None:
    write_qwen(tmp_path / "seer")
    encoded = base64.b64encode(picture(1)).decode()
    with serving("--model", str(tmp_path / "seer")) as server, visit(browser, server.url) as page:
        page.locator("option[value=seer]").wait_for(state="attached")
        page.locator("textarea").evaluate(PASTE, encoded)
        page.locator("#pictures img").wait_for()
        with page.expect_request("**/v1/chat/completions") as found:
            submit(page, "What is this?", "Chat", max_tokens="5")
            said(page, "Done")
        [message] = found.value.post_data_json["messages"]
        url = f"data:image/png;base64,{encoded}"
        assert message["content"] == [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        assert page.locator("#transcript img").get_attribute("src") == url
        assert page.locator("#pictures img").count() == 0
        page.locator("textarea").evaluate(PASTE, encoded)
        page.locator("#pictures button").click()
        assert page.locator("#pictures img").count() == 0


def test_a_picture_for_a_model_of_texts_is_left_out_with_a_sentence(browser: Any, served: Served) -> None:
    with visit(browser, served.url) as page:
        page.locator("textarea").evaluate(PASTE, base64.b64encode(picture(1)).decode())
        said(page, "The picture was left out")
        assert page.locator("#pictures img").count() == 0
