"""What tests of the page do in a browser."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DESKTOP = {"width": 1200, "height": 900}
PHONE = {"width": 360, "height": 740}
NETWORK = "Failed to load resource"  # Chromium's words for a response that the page expects, such as a 401


@contextmanager
def visit(browser: Any, url: str, viewport: dict[str, int] = DESKTOP, **options: Any) -> Iterator[Any]:
    """A page in a new tab. Fails if it has violated its policy or raised an error by the end."""
    context = browser.new_context(viewport=viewport, **options)
    page, errors = context.new_page(), list[str]()

    def on_console(message: Any) -> None:
        if message.type == "error" and NETWORK not in message.text:
            errors.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    yield page
    context.close()
    assert not errors, errors


@contextmanager
def chatting(
    browser: Any,
    url: str,
    tokens: int | None = 24,
    viewport: dict[str, int] = DESKTOP,
    temperature: float = 0,  # so that what an answer shows does not vary
    **options: Any,
) -> Iterator[Any]:
    """The chat in a new tab, with answers of at most `tokens`."""
    with visit(browser, url, viewport, **options) as page:
        page.locator("#model option").first.wait_for(state="attached")
        page.click("#open-settings")
        page.fill("[name=max_tokens]", "" if tokens is None else str(tokens))
        page.fill("[name=temperature]", str(temperature))
        page.click("#settings-form > .main")
        yield page


def ask(page: Any, text: str) -> str:
    """Sends a message in the chat, and returns the text of its answer."""
    page.fill("#composer textarea", text)
    page.press("#composer textarea", "Enter")
    return answer(page)


def answer(page: Any) -> str:
    """Waits for the end of the last answer, and returns its text."""
    page.locator("article.assistant:last-child[aria-busy=false]").wait_for()
    return str(page.locator("article.assistant .answer-text").last.inner_text())


def submit(page: Any, prompt: str, mode: str = "Completion", **fields: str) -> None:
    """Fills in the form and runs it. `fields` are settings by name."""
    page.get_by_text(mode, exact=True).click()
    page.fill("[name=prompt]", prompt)
    if not page.locator("#settings").evaluate("details => details.open"):
        page.click("#settings summary")
    for name, value in fields.items():
        page.fill(f"[name={name}]", value)
    page.click("#run")


def said(page: Any, words: str) -> None:
    """Waits until the page says `words`."""
    page.locator("#words", has_text=words).wait_for()


def shown_tokens(page: Any, answer: str = "#transcript .answer") -> list[list[str]]:
    """The text and the source of each token on the page; the source is empty for bonus tokens."""
    source = "[...span.classList].find((name) => name.startsWith('source-'))?.slice(7) ?? ''"
    spans: list[list[str]] = page.locator(f"{answer} .token").evaluate_all(
        f"spans => spans.map((span) => [span.textContent, {source}])"
    )
    return spans


def write_conversation(folder: Path, text: str) -> Path:
    message = {"id": "a", "parent": None, "role": "assistant", "at": 1, "text": text}
    conversation = {"id": "c", "title": "t", "at": 1, "system": "", "messages": {"a": message}, "leaf": "a"}
    file = folder / "conversation.json"
    file.write_text(json.dumps({"format": "outrider-conversations", "version": 1, "conversations": [conversation]}))
    return file
