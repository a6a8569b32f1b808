"""The screenshots of docs/playground.md, with SmolLM2-135M-Instruct. `python -m tests.server.page.screenshots` renews them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from outrider.models import smollm2
from tests.server.page.chromium import PHONE, launched, said, submit, visit
from tests.servers import ROOT, serving

FOLDER = ROOT / "docs" / "images"
PROMPT = "Explain how bread is made, step by step."
RACE = (
    "Summarize this text: The fox and the hen were friends. Every morning the fox brought the hen some corn, and every evening "
    "the hen told the fox a story about the sea. The fox had never seen the sea, and the hen had never left the farm."
)
NODES = "8"  # more than pay on two cores, so that trees have branches
FIELDS = {"max_tokens": "160", "temperature": "0", "max_nodes": NODES}
DESKTOP = {"width": 1120, "height": 860}
WAIT_MS = 180_000  # for an answer or a race on a busy machine
COLOURS = 192  # few, for small files


def take(browser: Any, url: str, folder: Path) -> list[Path]:
    """Takes the four pictures: an answer, a race, a draft tree, and the page on a phone."""
    paths = [folder / f"playground-{name}.png" for name in ("answer", "race", "tree", "phone")]
    with visit(browser, url, DESKTOP, color_scheme="light") as page:
        ask(page)
        page.screenshot(path=paths[0])
        page.fill("textarea", RACE)
        page.fill("[name=max_nodes]", "")
        page.click("#start-race")
        page.locator("#race .verdict", has_text="Equal texts.").wait_for()
        page.evaluate("scrollTo(0, 0)")
        page.locator("h1").hover()
        page.screenshot(path=paths[1])
    with visit(browser, url, DESKTOP, color_scheme="dark") as page:
        ask(page)
        choose_step(page)
        page.screenshot(path=paths[2])
    with visit(browser, url, PHONE, color_scheme="light", device_scale_factor=2) as page:
        ask(page)
        choose_step(page)
        page.locator("#figures").evaluate("element => element.scrollIntoView()")
        page.screenshot(path=paths[3])
    return paths


def ask(page: Any) -> None:
    """Runs the prompt, and waits for its chart."""
    page.set_default_timeout(WAIT_MS)
    page.locator("#state", has_text="Ready").wait_for()
    submit(page, PROMPT, "Chat", **FIELDS)
    said(page, "Done")
    page.locator("#chart canvas").wait_for()


def choose_step(page: Any) -> None:
    """Opens the widest tree of a step with accepted and rejected nodes."""
    tokens = page.locator("#transcript .token[data-index]")
    best, most = 0, 0
    for number in range(0, tokens.count(), 3):
        tokens.nth(number).dispatch_event("click")  # a line break has no area to click on
        counts = [page.locator(f"#tree .node.{state}").count() for state in ("accepted", "rejected")]
        if min(counts) > 1 and sum(counts) > most:
            best, most = number, sum(counts)
    tokens.nth(best).dispatch_event("click")


def main() -> None:
    from PIL import Image

    FOLDER.mkdir(exist_ok=True)
    with (
        serving("--model", smollm2.NAME, "--sessions.automatic", "off") as server,
        launched(importlib.import_module("playwright.sync_api")) as browser,
    ):
        for path in take(browser, server.url, FOLDER):
            Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
            print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
