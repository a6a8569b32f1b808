"""Fields without an equal: rejected by name, unless their value has no effect."""

from typing import Any

import pytest

from outrider.server.llama.schema import InfillBody
from outrider.server.openai.responses import schema as responses
from outrider.server.openai.schema import ChatBody, CompletionBody
from tests.server.fakes import FakeEngine, app_with, fetch

CHATS, COMPLETIONS, RESPONSES, INFILL = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/infill"
REQUIRED: dict[str, dict[str, Any]] = {
    CHATS: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
    INFILL: {"input_prefix": "x", "input_suffix": "y"},
}
TABLES = {
    CHATS: ChatBody.unsupported,
    COMPLETIONS: CompletionBody.unsupported,
    RESPONSES: responses.UNSUPPORTED,
    INFILL: InfillBody.unsupported,
}
FIELDS = [(path, name) for path, table in TABLES.items() for name in table]
APP = app_with(FakeEngine("a"), special_tokens=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_a_field_is_accepted_only_with_a_value_without_effect(path: str, name: str) -> None:
    for value in TABLES[path][name]:
        assert fetch(APP, "POST", path, {**REQUIRED[path], name: value}).status_code == 200, value
    for value in ("other", 0.123, {"x": 1}):
        error = fetch(APP, "POST", path, {**REQUIRED[path], name: value}).json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert f"'{name}' is not supported" in error["message"]


def test_the_error_names_what_to_use_instead() -> None:
    for path, fields, words in (
        (CHATS, {"mirostat": 2}, "leave it out, or use 'top_p' or 'min_p'."),
        (RESPONSES, {"max_tokens": 3}, "leave it out, or use 'max_output_tokens'."),
    ):
        error = fetch(APP, "POST", path, {**REQUIRED[path], **fields}).json()["error"]
        assert error["message"].endswith(words)


def test_llama_servers_names_have_their_meaning() -> None:
    body = CompletionBody.model_validate({"model": "m", "prompt": "x", "n_predict": 7, "repeat_penalty": 1.5})
    assert (body.token_limit, body.sampling_params().repetition_penalty) == (7, 1.5)
    both = CompletionBody.model_validate({"model": "m", "prompt": "x", "n_predict": 7, "max_tokens": 5})
    assert both.token_limit == 5
    for limited, limit in (({"n_predict": -1}, None), ({}, 16), ({"n_predict": 0}, 0)):
        assert CompletionBody.model_validate({"model": "m", "prompt": "x", **limited}).token_limit == limit
    chat = ChatBody.model_validate({"model": "m", **REQUIRED[CHATS], "n_predict": 7})
    assert chat.token_limit == 7
    biased = CompletionBody.model_validate({"model": "m", "prompt": "x", "logit_bias": [[15, -2.5], [27, False]]})
    assert biased.sampling_params().logit_bias == {15: -2.5, 27: -100}
