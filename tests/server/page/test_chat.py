"""The chat in a real browser, against a server of two real models."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.models import packaged
from tests.server.page.chromium import PHONE, answer, ask, chatting, said, visit, write_conversation
from tests.server.pictures.models import picture, write_qwen
from tests.servers import ALICE, Served, serving

QUESTION, OTHER = "Name three colours.", "Name three animals."
DROP = """async (element, [name, type, encoded]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0))], name, { type }));
  element.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def server(server: Served) -> Served:
    """SmolLM2 is loaded."""
    server.http.post("/api/generate", json={"model": packaged.SMOLLM2}).raise_for_status()
    return server


def titles(page: Any) -> list[str]:
    """Those of the list."""
    texts: list[str] = page.locator("#conversations li:visible").all_inner_texts()
    return texts


def drop(page: Any, name: str, kind: str, data: bytes) -> None:
    page.locator("#thread").evaluate(DROP, [name, kind, base64.b64encode(data).decode()])


def sent(page: Any, text: str) -> list[dict[str, Any]]:
    """Sends a message, and returns the messages of the request."""
    with page.expect_request("**/v1/chat/completions") as found:
        ask(page, text)
    messages: list[dict[str, Any]] = found.value.post_data_json["messages"]
    return messages


def test_conversations_are_kept_over_a_reload(browser: Any, server: Served) -> None:
    with chatting(browser, server.url) as page:
        texts = [ask(page, QUESTION)]
        page.click("#new")
        texts.append(ask(page, OTHER))
        page.reload()
        page.locator("#conversations li").nth(1).wait_for()
        assert titles(page) == [OTHER, QUESTION]
        assert (page.inner_text("article.user .text"), answer(page)) == (OTHER, texts[1])
        page.click(f"#conversations >> text={QUESTION}")
        page.locator("article.user .text", has_text=QUESTION).wait_for()
        assert answer(page) == texts[0]
        page.fill("#search", "ANIMALS")
        assert titles(page) == [OTHER]


def test_edited_and_new_answers_are_branches(browser: Any, server: Served) -> None:
    with chatting(browser, server.url, temperature=1) as page:
        first = ask(page, QUESTION)
        page.click("text=Regenerate")
        page.locator("article.assistant >> text='2 of 2'").wait_for()
        answer(page)
        page.press("article.assistant [aria-label='Previous branch']", "Enter")
        assert answer(page) == first
        assert page.evaluate("document.activeElement.ariaLabel") == "Next branch"
        page.click("text=Edit")
        assert page.input_value("article.user textarea") == QUESTION
        page.fill("article.user textarea", OTHER)
        page.press("article.user textarea", "Enter")
        page.locator("article.user >> text='2 of 2'").wait_for()
        second = answer(page)
        assert page.locator("article").count() == 2 and page.inner_text("article.user .text") == OTHER
        page.click("text=Edit")
        page.press("article.user textarea", "Escape")
        assert page.inner_text("article.user .text") == OTHER
        page.reload()
        assert answer(page) == second
        page.click("article.user [aria-label='Previous branch']")
        page.locator("article.user .text", has_text=QUESTION).wait_for()
        page.locator("article.assistant >> text='2 of 2'").wait_for()
        assert sent(page, "And more?")[0]["content"] == QUESTION


def test_an_answer_is_stopped_and_kept(browser: Any, server: Served) -> None:
    with chatting(browser, server.url, tokens=None) as page:
        page.fill("#composer textarea", "Count from one to a thousand, each number in words.")
        page.press("#composer textarea", "Enter")
        page.locator("article.assistant .answer-text p").first.wait_for()
        page.keyboard.press("Escape")
        text = answer(page)
        assert text and page.inner_text("article.assistant .note") == "Stopped."
        assert page.inner_text("#composer .main") == "Send"
        page.reload()
        assert answer(page) == text


def test_the_system_prompt_belongs_to_the_conversation(browser: Any, server: Served) -> None:
    with chatting(browser, server.url) as page:
        page.click("#open-settings")
        page.fill("[name=system]", "Answer in one word.")
        page.keyboard.press("Escape")
        assert sent(page, QUESTION)[0] == {"role": "system", "content": "Answer in one word."}
        page.click("#new")
        assert [message["role"] for message in sent(page, QUESTION)] == ["user"]


def test_files_are_part_of_the_message(browser: Any, server: Served, tmp_path: Path) -> None:
    with chatting(browser, server.url) as page:
        drop(page, "notes.md", "text/markdown", b"```\nblue\n```")
        page.locator("#composer .pictures >> text=notes.md").wait_for()
        (tmp_path / "list.txt").write_text("red")
        page.set_input_files("#composer input", tmp_path / "list.txt")
        page.locator("#composer .pictures >> text=list.txt").wait_for()
        [message] = sent(page, QUESTION)
        assert message["content"] == f"notes.md:\n````\n```\nblue\n```\n````\n\nlist.txt:\n```\nred\n```\n\n{QUESTION}"
        assert page.locator("article.user .file").count() == 2 and page.locator("#composer .file").count() == 0
        drop(page, "a.png", "image/png", picture(1))
        said(page, "The picture was left out")
        drop(page, "a.bin", "", b"\x00\xff")
        said(page, "a.bin was left out: it is neither a picture nor a text")


def test_a_model_that_sees_gets_the_picture(browser: Any, tmp_path: Path) -> None:
    write_qwen(tmp_path / "seer")
    with serving("--model", str(tmp_path / "seer")) as server, chatting(browser, server.url, 5) as page:
        drop(page, "a.png", "image/png", picture(1))
        page.locator("#composer img").wait_for()
        url = f"data:image/png;base64,{base64.b64encode(picture(1)).decode()}"
        assert sent(page, "What is this?")[0]["content"] == [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "What is this?"},
        ]
        page.reload()
        assert page.locator("article.user img").get_attribute("src") == url


def test_conversations_are_exported_and_imported(browser: Any, server: Served, tmp_path: Path) -> None:
    with chatting(browser, server.url) as page:
        text, file = ask(page, QUESTION), tmp_path / "conversations.json"
        with page.expect_download() as download:
            page.click("#export-all")
        download.value.save_as(file)
        page.once("dialog", lambda dialog: dialog.accept())
        page.click("#open-settings")
        page.click("#delete")
        page.locator("#conversations li").wait_for(state="detached")
        page.set_input_files("#file", file)
        said(page, "Imported 1 conversation.")
        assert titles(page) == [QUESTION] and answer(page) == text
        for content, words in (
            ("[", "This file is not JSON"),
            ('{"format": "outrider-run", "version": 1}', "This file has no conversations of this page"),
            (file.read_text().replace('"role": "user"', '"role": "root"'), "This file has no conversations of this page"),
        ):
            file.write_text(content)
            page.set_input_files("#file", file)
            said(page, words)
        assert titles(page) == [QUESTION]


# Stands in for a full disk.
FULL = """() => {
  window.put = IDBObjectStore.prototype.put;
  IDBObjectStore.prototype.put = () => { throw new DOMException("full", "QuotaExceededError"); };
}"""


def test_nothing_is_lost_when_the_browser_is_full(browser: Any, server: Served) -> None:
    with chatting(browser, server.url) as page:
        page.evaluate(FULL)
        text = ask(page, QUESTION)
        said(page, "The browser has no room left: this one lasts until you close the page; export it, or delete others.")
        assert titles(page) == [QUESTION] and text
        with page.expect_download() as download:
            page.click("#export-all")
        [kept] = json.loads(Path(download.value.path()).read_text())["conversations"]
        assert len(kept["messages"]) == 2
        page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
        ask(page, OTHER)
        page.reload()
        page.locator("article").nth(3).wait_for()


def test_two_tabs_lose_no_message_of_each_other(browser: Any, server: Served) -> None:
    with chatting(browser, server.url) as page:
        ask(page, QUESTION)
        second = page.context.new_page()
        second.goto(page.url)
        second.locator("#model option").first.wait_for(state="attached")
        answer(second)
        second.click("text=Regenerate")
        second.locator("article.assistant >> text='2 of 2'").wait_for()
        answer(second)
        page.locator("article.assistant >> text=of 2").wait_for()
        page.click("text=Regenerate")
        page.locator("article.assistant >> text='3 of 3'").wait_for()
        answer(page)
        page.reload()
        page.locator("article.assistant >> text=of 3").wait_for()
        assert page.locator("article.assistant").count() == 1


def test_models_are_chosen_and_loaded(browser: Any, server: Served) -> None:
    name = next(card.id for card in server.client.models.list().data if card.id != packaged.SMOLLM2)
    with chatting(browser, server.url, 5) as page:
        page.select_option("#model", name)
        with page.expect_request("**/api/generate") as found:
            page.click("#load")
        page.locator("#progress", has_text=f"Loading {name}").wait_for()
        assert found.value.post_data_json == {"model": name}
        page.locator("#progress").wait_for(state="hidden")
        assert page.locator("#load").is_hidden() and page.input_value("#model") == name
        ask(page, QUESTION)
        assert page.locator("article.assistant").get_attribute("aria-label") == f"Answer of {name}"
        page.reload()
        page.locator("#model option").first.wait_for(state="attached")
        assert page.input_value("#model") == name


def test_the_keyboard_is_enough(browser: Any, server: Served) -> None:
    with chatting(browser, server.url, 5) as page:
        page.keyboard.press("Control+Shift+O")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        page.keyboard.press("Enter")
        answer(page)
        assert page.inner_text("article.user .text") == "one\ntwo"
        focused = "document.activeElement.textContent || document.activeElement.tagName"
        assert page.evaluate(focused) == "TEXTAREA"  # the next message can be written at once
        for name in ("Regenerate", "Copy"):
            page.keyboard.press("Shift+Tab")
            assert page.evaluate(focused) == name
        for name in ("Regenerate", "TEXTAREA", "Attach", "Send"):
            page.keyboard.press("Tab")
            assert page.evaluate(focused) == name
        page.keyboard.press("Control+Shift+O")
        assert page.locator("article").count() == 0 and page.evaluate(focused) == "TEXTAREA"


# The characters that each highlight covers.
PAINTED = """() => Object.fromEntries([...CSS.highlights].map(([name, ranges]) => [name.slice(6),
  [...ranges].map((range) => range.startContainer.data.slice(range.startOffset, range.endOffset)).join("")]))"""


def letters(texts: dict[str, str]) -> dict[str, str]:
    """The letters of each source's text, without the sources that have none: Markdown and ends of lines are not painted."""
    found = {source: "".join(letter for letter in text if letter.isalpha()) for source, text in texts.items()}
    return {source: text for source, text in found.items() if text}


def test_the_overlay_shows_which_drafter_guessed(browser: Any, server: Served) -> None:
    with chatting(browser, server.url, 60) as page:
        ask(page, QUESTION)
        assert page.evaluate(PAINTED) == {}
        page.click("#overlay")
        with page.expect_response("**/v1/chat/completions") as found:
            text = ask(page, "Repeat them three times, in one line.")
        lines = [line[6:] for line in found.value.text().splitlines() if line.startswith("data: {")]
        traces = [choice["trace"] for line in lines for choice in json.loads(line)["choices"] if "trace" in choice]
        guessed = dict[str, str]()
        for trace in traces:
            for row in trace["accepted"]:
                source, token = trace["draft"]["sources"][row], trace["draft"]["texts"][row]
                guessed[source] = guessed.get(source, "") + ("" if token == "<|im_end|>" else token)  # the end is no text
        painted = page.evaluate(PAINTED)
        assert letters(guessed) == letters(painted) != {}
        assert text
        assert page.locator("article.assistant .legend").last.is_visible()
        page.reload()
        page.locator("article").nth(3).wait_for()
        assert page.evaluate(PAINTED) == painted
        page.click("#overlay")
        assert page.locator("article.assistant .legend").last.is_hidden()


def test_an_answer_that_grows_leaves_the_rest_alone(browser: Any, server: Served) -> None:
    watch = """() => { window.changes = 0;
      new MutationObserver((list) => (window.changes += list.length)).observe(document.querySelector("article.assistant .body"),
        { subtree: true, childList: true, characterData: true, attributes: true }); }"""
    with chatting(browser, server.url, 60) as page:
        ask(page, QUESTION)
        page.evaluate(watch)
        ask(page, OTHER)
        assert page.evaluate("window.changes") == 0


def test_a_phone_shows_the_chat_without_scrolling_sideways(browser: Any, server: Served, tmp_path: Path) -> None:
    wide = f"{'x' * 300}\n\n```\n{'y' * 300}\n```\n\n{'| a ' * 40}|\n{'|---' * 40}|\n{'| b ' * 40}|"
    with chatting(browser, server.url, viewport=PHONE) as page:
        ask(page, "z" * 300)
        page.set_input_files("#file", write_conversation(tmp_path, wide))
        said(page, "Imported")
        page.locator("article table").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.click("#menu")
        page.click("#conversations li >> nth=0")
        page.locator("article.user .text", has_text="zzz").wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        page.locator("#new").wait_for(state="hidden")


STORED = """async () => {
  const open = indexedDB.open("outrider");
  await new Promise((resolve) => (open.onsuccess = resolve));
  const stores = [...open.result.objectStoreNames];
  const reads = stores.map((name) => open.result.transaction(name).objectStore(name).getAll());
  await Promise.all(reads.map((read) => new Promise((resolve) => (read.onsuccess = resolve))));
  return JSON.stringify(reads.map((read) => read.result));
}"""


def test_a_key_is_asked_for_and_not_kept(browser: Any, guarded: Served) -> None:
    with visit(browser, guarded.url) as page:
        said(page, "This server needs an API key")
        page.fill("#settings [name=key]", ALICE)
        page.press("[name=key]", "Tab")
        page.locator("#model option", has_text=guarded.model).wait_for(state="attached")
        page.fill("[name=max_tokens]", "5")
        page.keyboard.press("Escape")
        page.click("#overlay")
        ask(page, QUESTION)
        said(page, "Done. This server does not show its drafts.")
        assert QUESTION in page.evaluate(STORED) and ALICE not in page.evaluate(STORED)
