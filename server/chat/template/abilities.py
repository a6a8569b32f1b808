"""Finds out what a chat template can render, by rendering short conversations and looking for their words.

Promises nothing about the meaning of a template's text: a template takes what it renders in the conversation's order.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

Message = dict[str, Any]


@dataclass(frozen=True)
class TemplateAbilities:
    """The forms of a conversation that a chat template takes; `form.fit` rewrites the others."""

    parts_only: bool = False  # content is left out unless it is a list of parts
    argument_texts: bool = False  # calls are left out unless their arguments are JSON texts
    system: bool = True  # a system message at the beginning
    system_alone: bool = True  # without any other message
    system_anywhere: bool = True  # several of them, also later, each in its place
    tools: bool = True  # the descriptions of tools
    calls: bool = True  # a call with its result
    several_calls: bool = True  # in one message
    text_with_calls: bool = True
    reasoning_with_text: bool = True  # both beside calls
    loose_results: bool = True  # results of no call
    repeats: bool = True  # messages of one role after each other, and any role first
    empty: bool = True  # messages without text
    names: bool = True  # of users


# The form that every template for chats takes: messages of the user and of the assistant in turns, all with text.
PLAIN = TemplateAbilities(**{each.name: each.name == "system_alone" for each in fields(TemplateAbilities)})


class Render(Protocol):
    """Renders a conversation; empty if the template refuses it."""

    def __call__(self, messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> str: ...


def in_parts(message: Message) -> Message:
    content = message["content"]
    return message | {"content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def with_argument_texts(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def converting(render: Render, convert: Callable[[Message], Message]) -> Render:
    return lambda messages, tools=(): render(list(map(convert, messages)), tools)


def tool(number: int) -> dict[str, Any]:
    city = {"type": "string", "description": f"qcity{number}"}
    parameters = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    function = {"name": f"qtool{number}", "description": f"qabout{number}", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool(1), tool(2)]


def user(number: int) -> Message:
    return {"role": "user", "content": f"quser{number}"}


def system(number: int) -> Message:
    return {"role": "system", "content": f"qsystem{number}"}


def answer(number: int) -> Message:
    return {"role": "assistant", "content": f"qanswer{number}"}


def calls(*numbers: int, **fields: Any) -> Message:
    found = [
        {
            "id": f"qcall000{number}",
            "type": "function",
            "function": {"name": f"qtool{number}", "arguments": {"city": f"qplace{number}"}},
        }
        for number in numbers
    ]
    return {"role": "assistant", "content": "", "tool_calls": found, **fields}


def result(number: int) -> Message:
    return {"role": "tool", "tool_call_id": f"qcall000{number}", "name": f"qtool{number}", "content": f"qresult{number}"}


def shows(text: str, words: str) -> bool:
    at = -1
    for word in words.split():
        at = text.find(word, at + 1)
        if at < 0:
            return False
    return True


def probe(render: Render) -> TemplateAbilities:
    parts_only = "quser1" not in render([user(1)]) and "quser1" in converting(render, in_parts)([user(1)])
    if parts_only:
        render = converting(render, in_parts)
    tools = takes_tools(render)
    given = TOOLS if tools else ()
    argument_texts = not takes_calls(render, given) and takes_calls(converting(render, with_argument_texts), given)
    if argument_texts:
        render = converting(render, with_argument_texts)
    has_calls = argument_texts or takes_calls(render, given)
    pair = [result(1), result(2), answer(1)]
    beside = render([user(1), calls(1, content="qtext1"), result(1)], given)
    reasoned = render([user(1), calls(1, content="qtext1", reasoning_content="qwhy1"), result(1)], given)
    has_system = shows(render([system(1), user(1)]), "qsystem1 quser1")
    return TemplateAbilities(
        parts_only=parts_only,
        argument_texts=argument_texts,
        system=has_system,
        system_alone=not has_system or takes_system_alone(render, given),
        system_anywhere=shows(
            render([system(1), system(2), user(1), answer(1), system(3), user(2), system(4)]),
            "qsystem1 qsystem2 quser1 qanswer1 qsystem3 quser2 qsystem4",
        ),
        tools=tools,
        calls=has_calls,
        several_calls=has_calls
        and shows(render([user(1), calls(1, 2), *pair], given), "quser1 qplace1 qplace2 qresult1 qresult2 qanswer1"),
        text_with_calls=has_calls and "qtext1" in beside and "qplace1" in beside,
        reasoning_with_text=has_calls and "qplace1" in reasoned and ("qtext1" in reasoned or "qtext1" not in beside),
        loose_results=takes_loose_results(render, given),
        repeats=takes_repeats(render) and (not has_calls or takes_repeated_calls(render, given)),
        empty=shows(render([user(1), {"role": "assistant", "content": ""}, user(2)]), "quser1 quser2")
        and shows(render([{"role": "user", "content": ""}, answer(1), user(1)]), "qanswer1 quser1"),
        names="qname1" in render([{**user(1), "name": "qname1"}]),
    )


def takes_tools(render: Render) -> bool:
    """Whether tools are rendered, with a system message and without one."""
    alone, led = render([user(1)], TOOLS), render([system(1), user(1)], TOOLS)
    return all(name in alone and (name in led or not led) for name in ("qtool1", "qtool2")) and "quser1" in alone


def takes_calls(render: Render, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether a call and its result are rendered, in a request with `tools` and in one without any."""
    exchange, said = [user(1), calls(1), result(1)], "quser1 qtool1 qplace1 qresult1"
    return all(
        shows(render([*exchange, answer(2), user(2)], given), f"{said} qanswer2 quser2")
        and shows(render(exchange, given), said)
        for given in ((), tools)
    )


def takes_loose_results(render: Render, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether results of no call, whose functions have no name, are rendered."""
    loose = {"role": "tool", "tool_call_id": "qcall0001", "content": "qresult1"}
    return shows(render([user(1), loose, answer(1)], tools), "quser1 qresult1 qanswer1") and shows(
        render([user(1), answer(1), loose, answer(2)], tools), "quser1 qanswer1 qresult1 qanswer2"
    )


def takes_system_alone(render: Render, tools: Sequence[dict[str, Any]]) -> bool:
    """Whether a system message and the tools are rendered without a user's message."""
    text = render([system(1)], tools)
    return all(word in text for word in ("qsystem1", *(each["function"]["name"] for each in tools)))


def takes_repeats(render: Render) -> bool:
    """Whether roles need not alternate, and the assistant may begin."""
    return (
        shows(render([user(1), user(2)]), "quser1 quser2")
        and shows(render([user(1), answer(1), answer(2), user(2)]), "quser1 qanswer1 qanswer2 quser2")
        and shows(render([answer(1), user(1)]), "qanswer1 quser1")
    )


def takes_repeated_calls(render: Render, tools: Sequence[dict[str, Any]]) -> bool:
    return (
        shows(render([user(1), calls(1), calls(2), result(1), result(2)], tools), "quser1 qplace1 qplace2 qresult1 qresult2")
        and shows(render([user(1), calls(1), result(1), user(2)], tools), "quser1 qplace1 qresult1 quser2")
        and shows(render([user(1), calls(1), user(2)], tools), "quser1 qplace1 quser2")
    )
