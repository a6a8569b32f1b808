"""Responses over HTTP: what Codex sends, custom tools, stored items, and what is left out."""

import json
import logging
from typing import Any

import pytest

from tests.server.chat.tools.patch_grammar import PATCH
from tests.server.fakes import FakeEngine, app_with, events, fetch, post
from tests.server.openai.responses.codex import REQUEST

PATH = "/v1/responses"
CALL = f'<think>why</think><tool_call>\n{{"name": "apply_patch", "arguments": {json.dumps({"input": PATCH})}}}\n</tool_call>'
TEMPLATE = (
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}"
    "{% for m in messages %}[{{ m.role }}: {{ m.reasoning_content or '' }}|{{ m.content }}"
    "{% for c in m.tool_calls or [] %}|{{ c.function.name }}{{ c.function.arguments }}{% endfor %}]{% endfor %}"
    "{# <think> <tool_call> #}"
)


def test_what_codex_sends_is_answered() -> None:
    engine = FakeEngine(*CALL)
    app = app_with(engine, TEMPLATE, model__aliases=["gpt-*"])
    engine.context_tokens = 1 << 13
    response = fetch(app, "POST", PATH, {**REQUEST, "model": "gpt-5-codex"})
    data = events(response)
    names = "tools.web_search, tools.image_generation, tools.local_shell, input.web_search_call, input.encrypted_content"
    assert response.headers["x-outrider-ignored"] == f"{names}, text.verbosity"
    kinds = [each["type"].removeprefix("response.") for each in data]
    assert [kind for number, kind in enumerate(kinds) if not number or kind != kinds[number - 1]] == [
        *("created", "in_progress", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done", "output_item.added", "custom_tool_call_input.delta"),
        *("custom_tool_call_input.done", "output_item.done", "completed"),
    ]
    done = next(each for each in data if each["type"] == "response.custom_tool_call_input.done")
    deltas = [each for each in data if each["type"] == "response.custom_tool_call_input.delta"]
    assert done["input"] == "".join(each["delta"] for each in deltas) == PATCH and len(deltas) > 10
    _, call = data[-1]["response"]["output"]
    found = (call["type"], call["name"], call["input"], call["status"])
    assert found == ("custom_tool_call", "apply_patch", PATCH, "completed")
    assert call["call_id"].startswith("call_") and {each["item_id"] for each in deltas} == {call["id"]}
    assert data[-1]["response"]["model"] == "gpt-5-codex"
    assert [tool["name"] for tool in data[-1]["response"]["tools"]] == ["shell", "update_plan", "apply_patch", "mcp__docs"]
    assert engine.requests[0].session is None  # found by its text
    prompt = fetch(app, "POST", "/detokenize", {"tokens": engine.requests[0].prompt}).json()["prompt"]
    assert prompt.startswith(
        "(shell)(update_plan)(apply_patch)(mcp__docs__search)[system: |You are a coding agent.\n\n<permissions>"
    )
    assert "[assistant: I look first.||shell{" in prompt and "[system: |Be quick.]" in prompt


def test_later_instructions_are_the_users_where_the_template_takes_one_system_message() -> None:
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}: {{ m.content }}]{% endfor %}"
    )
    turns = [("developer", "a"), ("user", "b"), ("assistant", "d"), ("developer", "c")]
    items = [{"role": role, "content": text} for role, text in turns]
    for template, role in ((strict, "user"), (TEMPLATE.replace("|", ""), "system")):
        engine = FakeEngine("x")
        app = app_with(engine, template)
        assert fetch(app, "POST", PATH, {"input": items}).status_code == 200
        prompt = fetch(app, "POST", "/detokenize", {"tokens": engine.requests[0].prompt}).json()["prompt"]
        assert prompt.replace(" ", "") == f"[system:a][user:b][assistant:d][{role}:c]"


def test_a_call_of_a_namespaces_tool_names_both() -> None:
    engine = FakeEngine('<tool_call>\n{"name": "mcp__docs__search", "arguments": {}}\n</tool_call>')
    app = app_with(engine, TEMPLATE)
    tools = [{"type": "namespace", "name": "mcp__docs__", "tools": [{"type": "function", "name": "search"}]}]
    first = fetch(app, "POST", PATH, {"input": "x", "tools": tools}).json()
    (call,) = first["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "mcp__docs__", "search")
    fetch(app, "POST", PATH, {"input": "y", "previous_response_id": first["id"]})
    prompt = fetch(app, "POST", "/detokenize", {"tokens": engine.requests[1].prompt}).json()["prompt"]
    assert "|mcp__docs__search{}" in prompt


def test_a_custom_call_and_its_reasoning_continue_with_the_stored_response() -> None:
    engine = FakeEngine(CALL)
    app = app_with(engine, TEMPLATE)
    engine.context_tokens = 1 << 12
    tools = [{"type": "custom", "name": "apply_patch"}]
    first = fetch(app, "POST", PATH, {"input": "x", "tools": tools}).json()
    result = {"type": "custom_tool_call_output", "call_id": first["output"][-1]["call_id"], "output": "Done."}
    ids = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    by_id = fetch(app, "POST", PATH, {"input": [result], "previous_response_id": first["id"]})
    by_items = fetch(app, "POST", PATH, {"input": [{"role": "user", "content": "x"}, *ids, result]})
    assert (by_id.status_code, by_items.status_code) == (200, 200)
    _, second, third = (fetch(app, "POST", "/detokenize", {"tokens": each.prompt}).json()["prompt"] for each in engine.requests)
    assert second == third
    assert second.startswith("[user: |x][assistant: why||apply_patch{") and second.endswith("[tool: |Done.]")


def test_items_are_found_by_their_principal_only_and_named_once() -> None:
    keys = {"alice": "alices-secret-key", "bob": "bobs-secret-key"}
    app = app_with(FakeEngine("a"), auth__keys=keys)

    def call(name: str, method: str, path: str, body: Any = None) -> Any:
        return fetch(app, method, path, body, headers={"Authorization": f"Bearer {keys[name]}"})

    def send(name: str, *items: Any, **fields: Any) -> Any:
        return call(name, "POST", PATH, {"input": [{"role": "user", "content": "x"}, *items], **fields})

    made = send("alice").json()
    item = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert [call("bob", method, f"{PATH}/{made['id']}").status_code for method in ("GET", "DELETE")] == [404, 404]
    refused = send("bob", previous_response_id=made["id"])
    assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
    assert call("alice", "GET", f"{PATH}/{made['id']}").json()["id"] == made["id"]
    assert send("alice", item).status_code == 200
    for name, items, status in (("bob", [item], 404), ("alice", [{"id": "msg_x"}], 404), ("alice", [item, item], 400)):
        response = send(name, *items)
        assert (response.status_code, response.json()["error"]["param"]) == (status, "input")


def test_the_names_of_what_is_ignored_are_safe(caplog: pytest.LogCaptureFixture) -> None:
    tools = [{"type": "é\r\nx-evil: 1"}, {"type": "secret words"}, *({"type": f"t{number}"} for number in range(50))]
    with caplog.at_level(logging.INFO, "outrider.requests"):
        response = post(FakeEngine("a"), PATH, {"input": "x", "tools": tools})
    names = response.headers["x-outrider-ignored"].split(", ")
    assert names[:2] == ["tools.unknown", "tools.t0"] and len(names) == 32
    (record,) = [record for record in caplog.records if record.getMessage() == "ignored"]
    assert getattr(record, "fields")["ignored"] == "tools"  # the types are the client's words  # noqa: B009
    assert "x-outrider-ignored" not in post(FakeEngine("a"), PATH, {"input": "x"}).headers
