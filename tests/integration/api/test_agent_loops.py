"""An agent's loop through the official clients: a call of a tool, its result, and the final text, which reuses the first turn.

The server replays recorded answers; prompts, forwards, parsing and sessions are real.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.api.replaying import ARGUMENTS, CALL_TEXT, FINAL_TEXT, PROGRAM, long_model
from tests.servers import Served, serving

NAME, DESCRIPTION = "bash", "Runs a command."
SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}, "description": {"type": "string"}}}
FUNCTION = {"name": NAME, "description": DESCRIPTION, "parameters": SCHEMA}
RESULT = "the tool ran"
REREAD_TOKENS = 32  # at most, of a turn's prompt by the next turn

both_ways = pytest.mark.parametrize("stream", [False, True])


@pytest.fixture(scope="module")
def replaying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with a long context that replays the recorded answers."""
    model = long_model(tmp_path_factory.mktemp("replaying"))
    flags = ["--model.path", str(model), "--model.dtype", "float32", "--speculation.max_nodes", "8"]  # no costs are measured
    with serving(*flags, program=PROGRAM) as server:
        yield server


def task(name: str, stream: bool) -> str:
    """A text that no other test sends."""
    return f"{name}, stream {stream}: write the file proof.txt with your shell tool. " * 4


@both_ways
def test_chat_completions(replaying: Served, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": task("chat", stream)}]
    tools: list[Any] = [{"type": "function", "function": FUNCTION}]

    def ask() -> Any:
        fields: Any = {"model": replaying.model, "messages": messages, "tools": tools}
        if not stream:
            return replaying.client.chat.completions.create(**fields)
        with replaying.client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as events:
            return events.get_final_completion()

    first = ask()
    message = first.choices[0].message
    [call] = message.tool_calls
    assert (first.choices[0].finish_reason, message.content, call.function.name) == ("tool_calls", CALL_TEXT, NAME)
    assert json.loads(call.function.arguments) == ARGUMENTS
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    second = ask()
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", FINAL_TEXT)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens - REREAD_TOKENS


@both_ways
def test_responses(replaying: Served, stream: bool) -> None:
    inputs: list[Any] = [{"role": "user", "content": task("responses", stream)}]
    tools: list[Any] = [{"type": "function", **FUNCTION, "strict": False}]

    def ask(**more: Any) -> Any:
        fields: Any = {"model": replaying.model, "input": inputs, "tools": tools, "store": False} | more
        if not stream:
            return replaying.client.responses.create(**fields)
        with replaying.client.responses.stream(**fields) as events:
            return events.get_final_response()

    first = ask()
    [call] = [item for item in first.output if item.type == "function_call"]
    assert (first.output_text, call.name, json.loads(call.arguments)) == (CALL_TEXT, NAME, ARGUMENTS)
    kept = {"parsed_arguments"}  # the client's own field
    inputs += [item.model_dump(exclude=kept, exclude_none=True) for item in first.output]
    inputs.append({"type": "function_call_output", "call_id": call.call_id, "output": RESULT})
    second = ask()
    assert (second.status, second.output_text) == ("completed", FINAL_TEXT)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - REREAD_TOKENS


@both_ways
def test_messages(replaying: Served, stream: bool) -> None:
    import anthropic  # takes a second

    turns: list[Any] = [{"role": "user", "content": task("messages", stream)}]
    fields: Any = {"model": replaying.model, "max_tokens": 200, "tools": [{"name": NAME, "input_schema": SCHEMA}]}

    def ask(client: Any) -> Any:
        if not stream:
            return client.messages.create(messages=turns, **fields)
        with client.messages.stream(messages=turns, **fields) as events:
            return events.get_final_message()

    with anthropic.Anthropic(base_url=replaying.url, api_key="none", max_retries=0) as client:
        first = ask(client)
        text, call = first.content
        assert (first.stop_reason, text.text, call.name, call.input) == ("tool_use", CALL_TEXT, NAME, ARGUMENTS)
        turns.append({"role": "assistant", "content": first.content})
        turns.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": RESULT}]})
        second = ask(client)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", FINAL_TEXT)
    total = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert second.usage.cache_read_input_tokens >= total - REREAD_TOKENS


def test_responses_that_continue_an_older_one_leave_its_other_continuations_as_they_are(replaying: Served) -> None:
    def ask(text: str, previous: Any = None) -> Any:
        fields = {} if previous is None else {"previous_response_id": previous.id}
        return replaying.client.responses.create(model=replaying.model, input=text * 12, **fields)

    def reused(response: Any) -> int:
        return int(response.usage.input_tokens_details.cached_tokens)

    first = ask("A chain begins here. ")
    second = ask("The chain goes on. ", first)
    branch = ask("A branch leaves the chain. ", first)
    third = ask("The chain goes on after the branch. ", second)
    assert reused(second) >= first.usage.total_tokens - REREAD_TOKENS
    assert reused(branch) >= first.usage.total_tokens - REREAD_TOKENS
    assert reused(third) >= second.usage.total_tokens - REREAD_TOKENS
    assert reused(ask("The branch goes on. ", branch)) >= branch.usage.total_tokens - REREAD_TOKENS
