"""From Messages bodies to chats: turns, tools, thinking, and the line that would defeat the reuse of prefixes."""

from typing import Any

import pytest

from outrider.server.anthropic.conversion import to_chat, to_messages
from outrider.server.anthropic.schema import CountTokensBody, MessagesBody
from outrider.server.openai.conversation import content_text
from outrider.server.openai.schema import ChatBody

TOOL = {"name": "read", "description": "Reads.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
ASKED = {"role": "user", "content": "Hi"}
CALLS = [
    {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a"}},
    {"type": "tool_use", "id": "toolu_2", "name": "read", "input": {}},
]


def chat(messages: Any = (ASKED,), **fields: Any) -> ChatBody:
    body = MessagesBody.model_validate({"model": "m", "max_tokens": 9, "messages": list(messages), **fields})
    return to_chat(body, {})


def rendered(messages: Any, **fields: Any) -> list[dict[str, Any]]:
    return [message.rendered() for message in chat(messages, **fields).messages]


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def test_a_conversation_with_parallel_calls() -> None:
    thinking = {"type": "thinking", "thinking": "I should look.", "signature": "x"}
    answer = {"role": "assistant", "content": [thinking, {"type": "redacted_thinking", "data": "x"}, text("Sure."), *CALLS]}
    results = user(
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [text("one"), text("two")]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such file", "is_error": True},
        text("Well?"),
    )
    system, asked, called, *results_and_text = rendered([ASKED, answer, results], system=[text("Be"), text("short.")])
    assert system == {"role": "system", "content": "Be\nshort."}
    assert asked == ASKED
    assert called["content"] == "Sure." and called["reasoning_content"] == "I should look."
    assert [(call["id"], call["function"]["arguments"]) for call in called["tool_calls"]] == [
        ("toolu_1", {"path": "a"}),
        ("toolu_2", {}),
    ]
    assert results_and_text == [
        {"role": "tool", "content": "one\ntwo", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: no such file", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize("system", ["{}\nBe short.", [text("{}"), text("Be short.")], [text("{}\n"), text("Be short.")]])
def test_a_line_that_changes_with_every_request_does_not_change_the_prompt(system: Any) -> None:
    prompts = []
    for value in ("cc_version=2.1; cch=abc;", "cc_version=2.1; cch=def;"):
        line = f"x-anthropic-billing-header: {value}"
        filled = system.format(line) if isinstance(system, str) else [text(each["text"].format(line)) for each in system]
        prompts.append(rendered([ASKED], system=filled))
    assert prompts[0] == prompts[1] == [{"role": "system", "content": "Be short."}, ASKED]


def test_an_answer_that_was_begun_is_continued() -> None:
    begun = {"role": "assistant", "content": "{"}
    assert chat([ASKED, begun]).continue_final_message
    assert not chat([ASKED]).continue_final_message
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    for content in ("", [], [thinking]):
        empty = chat([ASKED, {"role": "assistant", "content": content}])
        assert not empty.continue_final_message and len(empty.messages) == 1


@pytest.mark.parametrize(("kind", "expected"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_tool_choices(kind: str, expected: str) -> None:
    body = chat(tools=[TOOL], tool_choice={"type": kind, "disable_parallel_tool_use": True})
    assert (body.tool_choice, body.parallel_tool_calls) == (expected, False)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
TEXT = {"type": "document", "title": "a.txt", "source": {"type": "text", "media_type": "text/plain", "data": "one"}}
FOUND = {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "two"}]}
IMAGE_LINE = "[An image was left out: this model reads text only.]"
PDF_LINE = "[A document was left out: this model reads text only.]"


def test_a_line_stands_for_what_the_model_cannot_read() -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "x"}, IMAGE, PDF, TEXT, FOUND]}
    turns = [{"role": "user", "content": [result, IMAGE, {"type": "text", "text": "y"}, TEXT]}]
    body = CountTokensBody.model_validate({"model": "m", "messages": turns})
    tool, user = to_messages(body)
    assert content_text(tool.content) == f"x\n{IMAGE_LINE}\n{PDF_LINE}\na.txt\none\nt\ns\ntwo"
    assert content_text(user.content) == f"{IMAGE_LINE}\ny\na.txt\none"
    assert body.ignored == ["messages.image", "messages.document"]


def test_a_model_that_reads_pictures_gets_them_between_the_texts() -> None:
    block = {"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}
    stored = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    result = {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": [IMAGE]}
    texts = [{"type": "text", "text": text} for text in "abc"]
    turns = [{"role": "user", "content": [result, *texts[:2], IMAGE, block, texts[2], stored]}]
    tool, user = to_messages(CountTokensBody.model_validate({"model": "m", "messages": turns}))
    picture = {"type": "image"}
    assert tool.rendered(True)["content"] == [{"type": "text", "text": "Error:"}, picture]
    first, last = {"type": "text", "text": "a\nb"}, {"type": "text", "text": f"c\n{IMAGE_LINE}"}
    assert user.rendered(True)["content"] == [first, picture, picture, last]
    assert user.picture_urls == ["data:image/png;base64,AAAA", "https://a/b.png"] and user.picture_count == 3
    assert user.rendered()["content"] == f"a\nb\n{IMAGE_LINE}\n{IMAGE_LINE}\nc\n{IMAGE_LINE}"
