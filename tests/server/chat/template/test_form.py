"""Conversations in a template's form: nothing gets lost, a growing one keeps its beginning, and each template takes it."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.chat.template import ChatTemplate, TemplateAbilities, fit
from outrider.server.chat.template.form import FILLER
from outrider.server.chat.tools import FORMATS, with_model_ids
from outrider.server.openai.conversation import Message
from tests.server.chat.template.restricted import RESTRICTED
from tests.server.fakes import TOKENIZER

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
ARGUMENTS: list[Any] = ["", " ", None, "null", "[]", "5", 5, '{"path": "/data/x', "{'a': 1}", {"a": 1}, '{"a": {"b": [1]}}']
IDS = st.sampled_from([None, "", "a", "b"])
WORD = re.compile("q[0-9]+z")


def with_words(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with a word of its own in the place of each text that is None."""
    count = iter(range(10**6))
    return [{**turn, "content": f"q{next(count)}z" if turn["content"] is ... else turn["content"]} for turn in turns]


TEXTS = st.sampled_from([..., ..., ..., "", None])
CALLS = st.lists(
    st.builds(
        lambda id, arguments: {"id": id, "function": {"name": "look", "arguments": arguments}}, IDS, st.sampled_from(ARGUMENTS)
    ),
    min_size=1,
    max_size=3,
)
TURNS = st.one_of(
    st.builds(
        lambda role, content: {"role": role, "content": content}, st.sampled_from(["system", "developer", "user"]), TEXTS
    ),
    st.builds(lambda content: {"role": "assistant", "content": content}, TEXTS),
    st.builds(
        lambda content, calls, why: {"role": "assistant", "content": content, "tool_calls": calls, "reasoning_content": why},
        *(TEXTS, CALLS, st.sampled_from([None, "q999z"])),
    ),
    st.builds(lambda content, id: {"role": "tool", "content": content, "tool_call_id": id}, TEXTS, IDS),
)
CONVERSATIONS = st.lists(TURNS, min_size=1, max_size=9).map(with_words)
ABILITIES = st.builds(TemplateAbilities, **{field.name: st.booleans() for field in fields(TemplateAbilities)})


def rendered(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return with_model_ids([Message.model_validate(turn).rendered() for turn in turns], "%hash")


def text_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@given(CONVERSATIONS, ABILITIES, st.booleans())
@settings(deadline=None, max_examples=100)
def test_a_conversation_that_grows_keeps_its_beginning(
    turns: list[dict[str, Any]], abilities: TemplateAbilities, has_tools: bool
) -> None:
    tools, form = [TOOL] * has_tools, FORMATS["hermes"]
    whole = fit(rendered(turns), tools, abilities, form)
    for size in range(1, len(turns)):
        said = [turn["role"] for turn in turns[:size] if turn["role"] not in ("system", "developer")]
        if turns[size]["role"] in ("system", "developer") and said[-1:] == ["user"]:  # it moves before the user's message
            continue
        if not said:  # a user's message may stand where there are only system messages
            continue
        part = fit(rendered(turns[:size]), tools, abilities, form)
        *before, last = part
        assert whole[: len(before)] == before
        same = whole[len(before)]
        assert {**same, "content": "", "reasoning_content": ""} == {**last, "content": "", "reasoning_content": ""}
        assert text_of(same).startswith(text_of(last))
        assert same.get("reasoning_content", "").startswith(last.get("reasoning_content", ""))


@given(CONVERSATIONS, ABILITIES, st.booleans())
@settings(deadline=None, max_examples=100)
def test_nothing_gets_lost_and_roles_alternate_where_they_must(
    turns: list[dict[str, Any]], abilities: TemplateAbilities, has_tools: bool
) -> None:
    messages = rendered(turns)
    fitted = fit(messages, [TOOL] * has_tools, abilities, FORMATS["hermes"])
    assert set(WORD.findall(json.dumps(messages))) == set(WORD.findall(json.dumps(fitted)))
    if has_tools and not abilities.tools:
        assert '"name": "look"' in text_of(fitted[0])
    if not abilities.system:
        assert all(message["role"] != "system" for message in fitted)
    if not abilities.calls:
        assert not any(message.get("tool_calls") for message in fitted)
    if not abilities.repeats:
        turning = [m["role"] for m in fitted if m["role"] in ("user", "assistant") and not m.get("tool_calls")]
        assert turning == [("user", "assistant")[number % 2] for number in range(len(turning))]
    if not abilities.empty:
        assert all(text_of(m) or m.get("tool_calls") for m in fitted if m["role"] in ("user", "assistant"))


def call(arguments: Any, id: Any = "a") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


ASKED, ANSWERED, NEXT = ({"role": role, "content": f"q{n}z"} for n, role in enumerate(("user", "assistant", "user")))
RESULT = {"role": "tool", "tool_call_id": "a", "content": "q7z"}


def called(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A message of the assistant with these calls."""
    return {"role": "assistant", "tool_calls": [*calls], **fields}


def system(content: str, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": content}


SECOND = {**RESULT, "tool_call_id": "b"}
LEGACY = {"role": "assistant", "function_call": {"name": "look", "arguments": ""}}
HISTORIES: dict[str, list[dict[str, Any]]] = {
    **{f"arguments {each!r}": [ASKED, called(call(each), content=None), RESULT, ANSWERED, NEXT] for each in ARGUMENTS},
    "several": [ASKED, called(call("{}"), call("{}", "b")), RESULT, SECOND],
    "one id": [ASKED, called(call("{}"), call("{}")), RESULT, RESULT, NEXT],
    "no id": [ASKED, called(call("{}", None)), {"role": "tool", "content": "q7z"}, NEXT],
    "no result": [ASKED, called(call("{}"), content=""), NEXT],
    "no result, answered": [ASKED, called(call("{}")), ANSWERED, NEXT],
    "no call": [ASKED, ANSWERED, RESULT, NEXT],
    "result first": [RESULT, NEXT],
    "result twice": [ASKED, called(call("{}")), RESULT, RESULT, NEXT],
    "text and reasoning": [ASKED, called(call("{}"), content="q8z", reasoning_content="q9z"), RESULT],
    "no texts": [{"role": "user", "content": None}, {"role": "assistant", "content": ""}, {"role": "user"}],
    "users": [ASKED, NEXT],
    "answers": [ASKED, ANSWERED, {**ANSWERED, "content": "q5z"}, NEXT],
    "answer first": [ANSWERED, NEXT],
    "systems": [system("q3z"), system("q4z", "developer"), ASKED],
    "system later": [ASKED, ANSWERED, system("q3z"), NEXT, system("q4z")],
    "system alone": [system("q3z")],
    "function role": [ASKED, LEGACY, {"role": "function", "name": "look", "content": "q7z"}, NEXT],
    "refusal": [ASKED, {"role": "assistant", "content": None, "refusal": "q8z"}, NEXT],
}


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", RESTRICTED)
def test_every_template_takes_every_history(name: str, tools: list[dict[str, Any]]) -> None:
    template = ChatTemplate(TOKENIZER, RESTRICTED[name][0])
    for history in HISTORIES.values():
        messages = rendered(history)
        text = template.write(messages, tools, add_generation_prompt=True)
        # Reasoning of earlier turns is the template's affair.
        said = [{**message, "reasoning_content": ""} for message in messages]
        assert set(WORD.findall(json.dumps(said))) <= set(WORD.findall(text)), history
        assert not tools or "look" in text
        assert "raw_arguments" not in text or "raw_arguments" in json.dumps(messages)


@pytest.mark.parametrize(
    ("lacks", "turns", "expected"),
    [
        ({"system"}, [("system", "S"), ("user", "U")], [("user", "S\n\nU")]),
        ({"system_anywhere"}, [("system", "S"), ("system", "T"), ("user", "U")], [("system", "S\n\nT"), ("user", "U")]),
        ({"system_anywhere"}, [("user", "U"), ("system", "S")], [("system", "S"), ("user", "U")]),
        ({"system_anywhere"}, [("assistant", "A"), ("system", "S")], [("assistant", "A"), ("user", "S")]),
        (
            {"system_anywhere"},
            [("system", "S"), ("user", "U"), ("system", "T"), ("assistant", "A"), ("user", "V"), ("system", "W")],
            [("system", "S\n\nT"), ("user", "U"), ("assistant", "A"), ("user", "W"), ("user", "V")],
        ),
        (
            set(),
            [("user", "U"), ("system", "S"), ("system", "T"), ("assistant", "A"), ("tool", "R"), ("system", "W")],
            [("system", "S"), ("system", "T"), ("user", "U"), ("assistant", "A"), ("tool", "R"), ("system", "W")],
        ),
        ({"repeats"}, [("user", "U"), ("user", "V")], [("user", "U\n\nV")]),
        ({"repeats"}, [("assistant", "A"), ("user", "U")], [("user", FILLER), ("assistant", "A"), ("user", "U")]),
        ({"loose_results"}, [("tool", "R")], [("user", "<tool_response>\nR\n</tool_response>")]),
        ({"empty"}, [("user", ""), ("assistant", "A")], [("user", FILLER), ("assistant", "A")]),
    ],
)
def test_forms(lacks: set[str], turns: list[tuple[str, str]], expected: list[tuple[str, str]]) -> None:
    abilities = TemplateAbilities(**dict.fromkeys(lacks, False))
    found = fit([{"role": role, "content": text} for role, text in turns], [], abilities, FORMATS["hermes"])
    assert [(message["role"], message["content"]) for message in found] == expected
