"""Calls are parsed in every format, whose name the template tells, however the text is split; all other text is content."""

import copy
import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.server.chat.tools import FORMATS, Part, detect_format, merge_parts, tool_parser
from outrider.server.chat.tools.call_ids import with_model_ids
from tests.docs.markdown import ROOT
from tests.server.chat.tools.samples import DSML, FUNCTIONS, SAMPLES, WEATHER, Call, Sample
from tests.slow import mostly_slow

each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=[sample.format for sample in SAMPLES])
# One of each way to write calls: objects, parameters in tags, Python, fields, messages, and calls without markers.
VARIED: tuple[str, ...] = ("hermes", "mistral_args", "deepseek_v3", "qwen3_coder", "glm45", "deepseek_v32", "lfm2", "gemma4")
VARIED += ("harmony", "llama3", "pythonic")
each_format = pytest.mark.parametrize("format", mostly_slow(sorted(FORMATS), *VARIED))


def parse(format: str, pieces: list[str]) -> list[Part]:
    parser = tool_parser(format, FUNCTIONS)
    return merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())


def content_and_calls(parts: list[Part]) -> tuple[str, list[Call]]:
    content = "".join(part.text for part in parts if part.kind == "content")
    named = {part.call: part.text for part in parts if part.kind == "call"}
    texts = {number: "".join(p.text for p in parts if p.kind == "arguments" and p.call == number) for number in named}
    return content, [(name, json.loads(texts[number])) for number, name in sorted(named.items())]


def split_at(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@each_sample
def test_samples_are_parsed_at_every_cut(sample: Sample) -> None:
    parts = parse(sample.format, [sample.text])
    assert content_and_calls(parts) == ("", list(sample.calls))
    assert parse(sample.format, list(sample.text)) == parts
    for at in range(len(sample.text)):
        assert parse(sample.format, [sample.text[:at], sample.text[at:]]) == parts


@each_sample
def test_text_around_calls_is_content(sample: Sample) -> None:
    if FORMATS[sample.format].opening and sample.format != "harmony":
        opening = FORMATS[sample.format].opening
        marked = sample.text if sample.text.startswith(opening) else opening + sample.text
        parts = parse(sample.format, list(f"Let me see.\n\n{marked}\nDone, I hope."))
        assert content_and_calls(parts) == ("Let me see.Done, I hope.", list(sample.calls))
        assert parts[0] == Part("content", "Let me see.")


@each_sample
def test_calls_are_streamed_as_they_come(sample: Sample) -> None:
    parser = tool_parser(sample.format, FUNCTIONS)
    arrived = [(at, part) for at, character in enumerate(sample.text) for part in parser.feed(character)]
    first = next(at for at, part in arrived if part.kind == "call")
    pieces = [part.text for _, part in arrived if part.kind == "arguments" and part.call == 0]
    if sample.streamed:
        assert first < sample.text.index("San") and len(pieces) > 10
    assert json.loads("".join(pieces)) == WEATHER[1]
    assert parser.finish() == []


@each_sample
def test_unknown_fields_and_arguments(sample: Sample) -> None:
    if sample.odd:
        assert content_and_calls(parse(sample.format, list(sample.odd))) == ("", [sample.odd_call])


@each_sample
def test_what_is_not_quite_a_call_is_content_with_its_markers(sample: Sample) -> None:
    for text in sample.broken:
        for before, after in (("", ""), ("Well, ", " and so on"), ("", "\n")):
            whole = before + text + after
            assert parse(sample.format, [whole]) == [Part("content", whole)]
            assert parse(sample.format, list(whole)) == [Part("content", whole)]


@each_sample
def test_a_cut_off_call_is_content_or_a_call_with_the_arguments_so_far(sample: Sample) -> None:
    first_call = parse(sample.format, [sample.text])[:2]
    for size in range(len(sample.text)):
        content, *more = parse(sample.format, [sample.text[:size]]) or [Part("content", "")]
        if content.kind == "call":
            assert content == first_call[0]
            assert first_call[1].text.startswith("".join(part.text for part in more[:1])[:9])
        else:
            assert content.text == sample.text[:size] and not more


WORDS = ("w1w", "w2w", "w3w", "w4w")


def fragments(format: str) -> list[str]:
    """Markers and other pieces of calls in all formats that the parser accepts; none of them is an unknown field."""
    accepted = [FORMATS[name] for name in (format, *FORMATS[format].also)]
    literals = {word for each in accepted for word in (*each.before, *each.call, *each.after, *each.parameter)}
    key = FORMATS[format].key
    whole = [f'{{"name": "f", "{key}": {{"a": "', '"}}', '{"x": "', "f(a='", "')", "{f:", '<|"|>', "<|end|>", "<|start|>"]
    return sorted({word for word in literals if word[0] != "%"} | set(whole) | set(' \n{}[]()",;='))


@each_format
@settings(max_examples=30)
@given(data=st.data())
def test_no_word_is_lost_however_the_text_is_split(format: str, data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.sampled_from([*fragments(format), "f", "clock", *WORDS]), max_size=30))
    text = "".join(pieces)
    parts = parse(format, [text])
    found = "".join(part.text for part in parts)
    assert sorted(re.findall(r"w\dw", found)) == sorted(re.findall(r"w\dw", text))
    assert parse(format, split_at(text, data.draw(st.lists(st.integers(0, 200), max_size=6)))) == parts
    assert parse(format, list(text)) == parts


LONG = "x y " * 10_000
LONG_CALLS = [
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": "{LONG}"}}}}</tool_call>'),
    ("hermes", f'<tool_call>{{"arguments": {{"a": "{LONG}"}}, "name": "f"}}</tool_call>'),
    ("llama3", " " * 40_000 + "x" + " " * 40_000),
    ("pythonic", f'[f(a="{LONG}")]'),
    ("qwen3_coder", f"<tool_call><function=get_weather><parameter=city>{LONG}</parameter></function></tool_call>"),
    ("gemma4", f'<|tool_call>call:f{{a:<|"|>{LONG}<|"|>}}<tool_call|>'),
    ("harmony", f"<|channel|>analysis<|message|>{LONG}<|end|>"),
    ("harmony", "<|channel|>" * 8_000),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>" * 2_000),
]


@pytest.mark.timeout(40)
@pytest.mark.parametrize(("format", "text"), LONG_CALLS, ids=range(len(LONG_CALLS)))
@pytest.mark.parametrize("size", [4, 1 << 20])
def test_a_long_call_takes_linear_time(format: str, text: str, size: int) -> None:
    """Less than a tenth of a second; a minute, which is too long, if every piece is scanned from the start."""
    parts = parse(format, [text[at : at + size] for at in range(0, len(text), size)])
    assert parts == parse(format, [text])


def test_hermes_reads_the_tagged_calls_of_a_clients_prompt() -> None:
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
    assert content_and_calls(parse("hermes", list(text))) == ("", [("get_weather", {"city": "Oslo"})])


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, ' "a\\b"\n', ' "a\\b"\n'),
        ({"type": "integer"}, " 5 ", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, '"quoted"', "quoted"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"$ref": "#/$defs/text"}, "1", "1"),
        ({"$ref": "#/$defs/loop"}, "1", 1),
        (None, "x", "x"),
    ],
)
@pytest.mark.parametrize("format", ["qwen3_coder", "glm45", "glm47", "minimax_m2", "seed_oss", "deepseek_v32"])
def test_arguments_between_tags_have_the_types_of_the_schema(format: str, schema: Any, text: str, expected: Any) -> None:
    definitions = {"text": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}
    functions = {"f": {"properties": {"a": schema}, "$defs": definitions}}
    value = f"\n{text}\n" if format == "qwen3_coder" else text
    answer = {
        "qwen3_coder": f"<tool_call>\n<function=f>\n<parameter=a>{value}</parameter>\n</function>\n</tool_call>",
        "seed_oss": f"<seed:tool_call><function=f><parameter=a>{value}</parameter></function></seed:tool_call>",
        "glm47": f"<tool_call>f<arg_key>a</arg_key><arg_value>{value}</arg_value></tool_call>",
        "glm45": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>",
        "minimax_m2": f'<minimax:tool_call><invoke name="f">\n<parameter name="a">{value}</parameter>\n</invoke>\n',
        "deepseek_v32": dsml_call(value, "false"),
    }[format]
    for pieces in ([answer], list(answer)):
        parser = tool_parser(format, functions)
        parts = merge_parts([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert content_and_calls(parts) == ("", [("f", {"a": expected})])


def dsml_call(value: str, string: str) -> str:
    return (
        f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n<{DSML}parameter name="a" string="{string}">{value}'
        f"</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>"
    )


@pytest.mark.parametrize("value", ["'a\nb\"c'", '"a\nb\\"c"', "'a\\nb\"c'"])
def test_texts_of_python_calls_may_have_several_lines(value: str) -> None:
    for pieces in ([f"[f(a={value})]"], list(f"[f(a={value})]")):
        assert content_and_calls(parse("pythonic", pieces)) == ("", [("f", {"a": 'a\nb"c'})])


def test_models_that_fall_back_to_a_related_format() -> None:
    json_call = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
    assert content_and_calls(parse("qwen3_coder", [json_call])) == ("", [("clock", {})])
    assert content_and_calls(parse("mistral", ["[TOOL_CALLS]clock[ARGS]{}"])) == ("", [("clock", {})])
    assert content_and_calls(parse("lfm2", ['<|tool_call_start|>[{"name": "clock"}]<|tool_call_end|>'])) == (
        "",
        [("clock", {})],
    )


def test_harmony_channels() -> None:
    text = (
        "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}<|call|>"
    )
    expected = [Part("reasoning", "Why?"), Part("content", "I look."), Part("call", "clock"), Part("arguments", "{}")]
    for at in range(len(text)):
        assert parse("harmony", [text[:at], text[at:]]) == expected
    assert parse("harmony", list("<|channel|>final<|message|>Noon.<|return|>")) == [Part("content", "Noon.")]
    without_tools = tool_parser("harmony")
    call = "<|channel|>commentary to=functions.clock<|message|>{}"
    assert merge_parts(without_tools.feed(call) + without_tools.finish()) == [Part("content", call)]


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.format for sample in SAMPLES])
def test_the_format_is_detected_from_the_template(sample: Sample) -> None:
    assert detect_format(f"{{% if tools %}} {sample.template}") == FORMATS[sample.format]


def test_the_documentation_has_every_format() -> None:
    items = re.findall(r"^- `(\w+)` \((.*?)\):\s", (ROOT / "docs" / "tools.md").read_text(), flags=re.M)
    assert dict(items) == {format.name: format.models for format in FORMATS.values()}


def call(id: str, name: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": {}}}


CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Go"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_1", "f"), call("abcDEF123", "g")]},
    {"role": "tool", "content": "1", "tool_call_id": "abcDEF123"},
    {"role": "tool", "content": "2", "tool_call_id": "call_1"},
    {"role": "assistant", "content": "", "tool_calls": [call("call_1", "g")]},  # some clients count anew in every turn
    {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    {"role": "tool", "content": "4", "tool_call_id": "unknown"},
]


def ids(messages: list[dict[str, Any]]) -> list[str]:
    return [
        id
        for message in messages
        for id in (*(each["id"] for each in message.get("tool_calls", ())), *filter(None, [message.get("tool_call_id")]))
    ]


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("hermes", ["call_1", "abcDEF123", "abcDEF123", "call_1", "call_1", "call_1", "unknown"]),
        ("mistral", ["74196fe72", "abcDEF123", "abcDEF123", "74196fe72", "74196fe72", "74196fe72", "unknown"]),
        (
            "kimi_k2",
            ["functions.f:0", "functions.g:1", "functions.g:1", "functions.f:0", "functions.g:2", "functions.g:2", "unknown"],
        ),
    ],
)
def test_ids(format: str, expected: list[str]) -> None:
    before = copy.deepcopy(CONVERSATION)
    form = FORMATS[format].call_id
    assert ids(with_model_ids(CONVERSATION, form)) == expected
    assert before == CONVERSATION
    for size in range(len(CONVERSATION)):
        assert with_model_ids(CONVERSATION[:size], form) == with_model_ids(CONVERSATION, form)[:size]
