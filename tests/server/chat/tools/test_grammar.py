"""Grammars of calls: what is enforced, added tokens, custom tools; and calls without the markers of their format."""

import json
import random
import re
from typing import Any

import jsonschema
import llguidance.hf
import numpy as np
import pytest
from llguidance import LLMatcher
from transformers import AddedToken

from outrider import models
from outrider.server.chat.grammar_builder import joined
from outrider.server.chat.reasoning_parser import THINK
from outrider.server.chat.tools import FORMATS, calls_grammar, tool_parser
from outrider.server.chat.tools.lark_pattern import MAX_CHARACTERS, lark_pattern
from outrider.server.chat.tools.parts import Part, merge_parts
from outrider.server.chat.vocabulary import Vocabulary
from outrider.verify.tokenizer import load_by_transformers
from tests.server.chat.following import accepts, matcher_of
from tests.server.chat.tools.patch_grammar import PATCH, PATCH_GRAMMAR
from tests.server.chat.tools.samples import DSML, FUNCTIONS, SAMPLES, Call, Sample
from tests.server.chat.tools.test_parser import content_and_calls, each_format, each_sample, parse

WORD = {"type": "string", "maxLength": 6}
SMALL = {"$ref": "#/$defs/small"}
PARTS: dict[str, Any] = {
    "word": WORD,
    "some": {"type": "string", "minLength": 2, "maxLength": 3},
    "kind": {"enum": ["cat", "dog"]},
    "same": {"const": "x"},
    "size": {"type": "integer", "minimum": -99, "maximum": 99},
    "flag": {"type": "boolean"},
    "none": {"type": ["string", "null"], "maxLength": 3},
    "list": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
    "inner": {"type": "object", "properties": {"left": SMALL}, "required": ["left"], "additionalProperties": False},
    "either": {"anyOf": [SMALL, {"const": "no"}]},
}
MANY: dict[str, Any] = {"type": "object", "properties": PARTS, "required": [*PARTS], "additionalProperties": False}
MANY["$defs"] = {"small": {"type": "integer", "minimum": 0, "maximum": 9}}
OPTIONAL: dict[str, Any] = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "abc"},
    "additionalProperties": False,
}


def walk(grammar: str, seed: int) -> str:
    """A random complete answer under the grammar, of printable ASCII and of markers."""
    matcher, chooser, text = matcher_of(grammar), random.Random(seed), bytearray()
    for _ in range(3000):
        if forced := matcher.compute_ff_tokens():
            text += bytes(forced)
            assert matcher.consume_tokens(forced)
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:256]
        free = bits[ord("a")]
        allowed = [
            byte for byte in np.flatnonzero(bits).tolist() if byte == 10 or 32 <= byte < 127 or (byte > 127 and not free)
        ]
        if not allowed or (matcher.is_accepting() and chooser.random() < 0.5):
            break
        text.append(chooser.choice(allowed))
        assert matcher.consume_token(text[-1])
    assert matcher.is_accepting(), text
    return text.decode()


@each_sample
def test_samples_are_accepted(sample: Sample) -> None:
    text = sample.text.removesuffix("<|call|>")
    exact = text.replace("'San \"José\"'", '"San \\"José\\""').replace("'b c'", '"b c"')  # JSON's quotes in Python calls
    assert accepts(calls_grammar(sample.format, FUNCTIONS, 8, {}), exact) == sample.enforced
    if not FORMATS[sample.format].single:
        assert not accepts(calls_grammar(sample.format, FUNCTIONS, 1, {}), exact)


@each_format
@pytest.mark.parametrize("seed", range(4))
def test_every_enforced_answer_parses_to_calls_that_follow_the_schemas(format: str, seed: int) -> None:
    functions = {"many": MANY, "optional": OPTIONAL, "no-arguments": {"type": "object", "additionalProperties": False}}
    answer = walk(calls_grammar(format, functions, 3, {}), seed)
    parser = tool_parser(format, functions)
    content, calls = content_and_calls([*parser.feed(answer), *parser.finish()])
    assert content == "" and 1 <= len(calls) <= 3, answer
    for name, arguments in calls:
        jsonschema.validate(arguments, functions[name])


@pytest.mark.parametrize("special", [True, False])
def test_markers_that_are_added_tokens_are_accepted_as_these_tokens(special: bool) -> None:
    """Qwen's markers are added tokens that are not special, and llguidance still matches them by id only."""
    tokenizer: Any = load_by_transformers(str(models.TARGET))
    tags = ("think", "tool_call", "arg_key", "arg_value")
    markers = [*(f"<{tag}>" for tag in tags), *(f"</{tag}>" for tag in tags), *([DSML] if special else [])]
    tokenizer.add_tokens([AddedToken(marker, special=special) for marker in markers], special_tokens=special)
    tokens = Vocabulary(tokenizer).grammar_tokens
    wrapped = llguidance.hf.from_tokenizer(tokenizer, n_vocab=len(tokenizer))
    for format in ("hermes", "glm45", "qwen3_coder", "deepseek_v32"):
        text = next(sample.text for sample in SAMPLES if sample.format == format)
        calls = calls_grammar(format, FUNCTIONS, 8, tokens)
        grammar = joined(THINK.prefix(tokens, calls=True), {"calls": calls})
        matcher = LLMatcher(wrapped, grammar, log_level=0)
        ids = tokenizer.encode(f"Hm, a < b.</think>\n\n{text}", add_special_tokens=False)
        assert matcher.consume_tokens(ids) and matcher.is_accepting(), matcher.get_error()


@each_sample
def test_an_answer_may_end_after_each_call(sample: Sample) -> None:
    """Between calls and after the last one, a model may stop, also after white space and before the closing marker."""
    grammar = calls_grammar(sample.format, FUNCTIONS, 8, {})
    for seed in range(2):
        text = walk(grammar, seed)
        matcher = matcher_of(grammar)
        for at, byte in enumerate(text.encode(), start=1):
            assert matcher.consume_token(byte)
            if matcher.is_accepting():
                begun = text.encode()[:at].decode(errors="ignore")
                content, calls = content_and_calls(parse(sample.format, [begun]))
                assert calls and not content
                if FORMATS[sample.format].between.strip() == "":
                    spaced = matcher.deep_copy()
                    if spaced.consume_token(ord("\n")):
                        assert spaced.is_accepting()


def test_the_grammar_of_a_patch() -> None:
    pattern = lark_pattern(PATCH_GRAMMAR)
    assert re.fullmatch(pattern, PATCH)
    for broken in (PATCH[1:], PATCH.replace("@@ ", "@"), PATCH + "x", "*** Begin Patch\n*** End Patch\n"):
        assert not re.fullmatch(pattern, broken)


@pytest.mark.parametrize(
    ("grammar", "matches", "others"),
    [
        ('start: "a.b" | "c"~2..3', ["a.b", "cc", "ccc"], ["axb", "c", "cccc"]),
        ('start: ["x"] (A "-")* A // words\n!A.2: "a".."c"+\n', ["a", "xb-c", "abc"], ["x", "d", "a-"]),
        ('start: "Yes"i /N[o0]/i "\\n" /a\\/b/', ["yESn0\na/b"], ["yes", "Yesno a/b"]),
        ('?start: one\n  | two\none: "1"{2}\ntwo: "2"{1,} "3"{1,2} \n', ["11", "2233"], ["1", "2", "3"]),
        ('start: (\n  "a"\n  "b"\n)\n', ["ab"], ["a"]),
        ('start: "[" /[^\\]]*/ "]"', ["[a]", "[]"], ["a"]),
    ],
)
def test_constructs(grammar: str, matches: list[str], others: list[str]) -> None:
    pattern = lark_pattern(grammar)
    assert all(re.fullmatch(pattern, text) for text in matches)
    assert not any(re.fullmatch(pattern, text) for text in others)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "(" start ")" | "x"', "'start' is recursive"),
        ("start: missing", "no rule 'missing'"),
        ('start: "a"\n%ignore " "', "not supported"),
        ("start: X\n%import python.X", "only the terminals of 'common'"),
        ('start: "a" )', "is not supported"),
        ('start: %json {"type": "object"}', "not supported"),
        ('start: "ab".."c"', "one character each"),
        ("start: " + "(" * 5000, "nested too deep"),
    ],
)
def test_what_has_no_equal_is_named(grammar: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        lark_pattern(grammar)


def test_rules_that_double_do_not_fill_the_memory() -> None:
    doubling = "".join(f"r{number}: r{number + 1} r{number + 1}\n" for number in range(60))
    with pytest.raises(ValueError, match="has more than"):
        lark_pattern(f'start: r0\n{doubling}r60: "a"\n')
    copies = "".join(f"c{number}: long\n" for number in range(1000))
    all_copies = " | ".join(f"c{number}" for number in range(1000))
    with pytest.raises(ValueError, match="repeat each other too often"):
        lark_pattern(f'start: {all_copies}\n{copies}long: "{"x" * 30_000}"\n')
    assert len(lark_pattern("start: " + '"ab" ' * (MAX_CHARACTERS // 10))) <= MAX_CHARACTERS


OSLO = '{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}'
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 1}}'
CALLED: list[Call] = [("get_weather", {"city": "Oslo", "days": 2})]


def in_format(format: str, text: str) -> str:
    """The text as the content of an answer."""
    return f"<|channel|>final<|message|>{text}<|return|>" if format == "harmony" else text


def cuts(format: str, text: str) -> range:
    """Every fourth place; the formats, which read such calls alike, have all places together."""
    return range([*FORMATS].index(format) % 4, len(text), 4)


@each_format
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (OSLO, "", 1),
        (f"```json\n{OSLO}\n```", "", 1),
        (json.dumps(json.loads(OSLO), indent=2), "", 1),
        ('{"arguments": {"city": "Oslo", "days": 2}, "name": "get_weather"}', "", 1),
        (f"{OSLO}\n{PARIS}", "", 2),
        (f"```json\n{OSLO}\n```\n```json\n{PARIS}\n```", "", 2),
        (f"{OSLO}\n\nI will wait.", "I will wait.", 1),
        ("{" + OSLO + "}", "", 1),
        ("{" + OSLO + "}}\n", "", 1),
        ("```json\n{" + OSLO + "}\n```", "", 1),
        ("{" + OSLO + "}\n" + PARIS + "\nI will wait.", "I will wait.", 2),
    ],
)
def test_an_object_at_the_beginning_is_a_call(format: str, text: str, content: str, calls: int) -> None:
    text = in_format(format, text)
    parts = parse(format, [text])
    found_content, found = content_and_calls(parts)
    assert found[:1] == CALLED
    if not FORMATS[format].bare:  # these formats read a second call only after their separator
        assert (found_content, len(found)) == (content, calls)
    assert all(parse(format, [text[:at], text[at:]]) == parts for at in cuts(format, text))


@each_format
@pytest.mark.parametrize("before", ["<mode>act</mode>", "```python\n{}\n```\nSo I call:"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (OSLO, 1),
        (f"```json\n{OSLO}\n```", 1),
        (f"```\n{json.dumps(json.loads(OSLO), indent=2)}\n```\n\n", 1),
        (f"```json\n{OSLO}\n```\n\n```json\n{PARIS}", 2),
        ("{" + OSLO + "}\n" + PARIS, 2),
    ],
)
def test_objects_that_end_the_answer_are_calls(format: str, before: str, text: str, calls: int) -> None:
    if format == "harmony":
        return  # its calls are messages
    text = f"{before}\n\n{text}"
    parts = parse(format, [text])
    content, found = content_and_calls(parts)
    assert (content, found[:1], len(found)) == (before, CALLED, calls)
    assert all(parse(format, [text[:at], text[at:]]) == parts for at in cuts(format, text) if at >= len(before))


@each_format
@pytest.mark.parametrize(
    "text",
    [
        f"Such as:\n```json\n{OSLO}\n```\nwhich asks for Oslo.",
        f"Such as:\n{OSLO}\n\nAnd:\n{PARIS}.",
        f"Such as:\n```json\n{OSLO}\n```\n```json\n[1]\n```",
        'An answer:\n{"name": "no_tool", "arguments": {}}',
        'An answer:\n{"name": "get_weather", "arguments": {"city": "Os',
        "Code:\n```c\nint f()\n{\n}\n```",
    ],
)
def test_objects_before_other_text_are_content(format: str, text: str) -> None:
    parts = parse(format, list(in_format(format, text)))
    assert content_and_calls(parts) == (text, [])
    assert parse(format, [in_format(format, text)]) == parts


@each_format
@pytest.mark.parametrize(
    "text",
    [
        '{"answer": "Oslo"}',
        '{"name": "no_tool", "arguments": {}}',
        '{"name": "get_weather", "arguments": "Oslo"}',
        '{"name": "get_weather", "arguments": {"city": Oslo}}',
        '{"name": "get_weather", "arguments": {}, "id": 1}',
        '{"name": "get_weather", "arguments": {"city": "Os',
        "{{" + OSLO + "}}",
        '{{"name": "get_weather", "arguments": {}, "answer": "It rains."}}',
        "```python\nprint(1)\n```",
        f"Here it is: {OSLO}",
        f"```json\n[{OSLO}]\n```",
    ],
)
def test_any_other_object_is_content(format: str, text: str) -> None:
    if FORMATS[format].bare and "{" in text[:1]:
        return  # the format itself has calls without markers
    parts = parse(format, list(in_format(format, text)))
    assert content_and_calls(parts) == (text, [])


@each_format
@pytest.mark.parametrize(
    ("held", "freed"),
    [
        ('{"', "answer"),
        ('{"na', 'm": 1'),
        ('{"name": "', "other"),
        ('{"name": "get_weather", "', "id"),
        ("```py\n", "x"),
        ("`", "x"),
    ],
)
def test_text_is_held_back_only_while_it_can_be_a_call(format: str, held: str, freed: str) -> None:
    if FORMATS[format].bare or format == "harmony":
        return
    parser = tool_parser(format, FUNCTIONS)
    assert parser.feed(held) == []
    assert merge_parts(parser.feed(freed)) == [Part("content", held + freed)]


def test_without_tools_an_object_is_content() -> None:
    parser = tool_parser("hermes", {})
    assert merge_parts([*parser.feed(OSLO), *parser.finish()]) == [Part("content", OSLO)]
