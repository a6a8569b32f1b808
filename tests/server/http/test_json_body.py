"""JSON of any shape: bounded before it is decoded, and decoded strictly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.http.json_body import MAX_DEPTH, MAX_NODES, InvalidJSON, check_structure, decode
from tests.server.fakes import FakeEngine, app_with, fetch

APP = app_with(FakeEngine("x"))
# Structure as text, which must not count.
awkward = st.text(st.sampled_from('[]{}:",\\ aé'), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False, allow_infinity=False) | awkward,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(awkward, inner, max_size=4),
    max_leaves=12,
)


def send(content: bytes, path: str = "/v1/responses") -> tuple[int, str | None]:
    """The status of the response to a body, and its error code."""
    response = fetch(APP, "POST", path, content=content, headers={"content-type": "application/json"})
    return response.status_code, (response.json().get("error") or {}).get("code")


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_json_is_decoded_as_by_the_standard_library(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert decode(text) == decode(text.encode()) == value


def test_structure_inside_strings_does_not_count() -> None:
    for text in ('[{":' * MAX_NODES, '\\"[' * MAX_NODES, "\\\\[" * MAX_NODES, '"]' * MAX_NODES):
        assert decode(json.dumps([text, text])) == [text, text]
    check_structure(json.dumps(["["] * MAX_NODES).encode())


def test_depth_is_bounded_before_decoding() -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}"), ('[{"]":', "}]")):
        count = MAX_DEPTH // (opening.count("[") + opening.count("{"))
        assert decode(opening * count + "1" + closing * count)
        for more in (count + 1, 10_000):
            with pytest.raises(InvalidJSON, match="nested deeper than 128 levels"):
                decode(opening * more + "1" + closing * more)


@pytest.mark.parametrize("element", ["{}", "[]", "[1]", '{"":1}', '{"[":{}}', '"[",[]', '"[":1'])
def test_a_body_of_many_small_objects_is_rejected_before_decoding(element: str) -> None:
    with pytest.raises(InvalidJSON, match="has more than 131072 objects, arrays and fields"):
        decode("[" + ",".join([element] * (1 << 20)) + "]")


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a": -Infinity}', "1e999", "-1e999", "9" * 5000, '"\\ud800"', "{no", ""]
)
def test_numbers_and_text_that_json_does_not_have_are_rejected(text: str) -> None:
    with pytest.raises(InvalidJSON, match="is not valid JSON"):
        decode(text)
    assert send(text.encode() or b" ", "/tokenize") == (400, "invalid_json")


def test_a_validation_bomb_is_a_client_error() -> None:
    assert send(b'{"model":"m","input":[' + b"{}," * 100_000 + b"{}]}") == (400, "invalid_value")
    assert send(b'{"model":"m","input":[' + b"{}," * 2_000_000 + b"{}]}") == (400, "too_many")
    assert send(b'{"model":"m","input":' + b"[" * 600 + b"]" * 600 + b"}") == (400, "too_deep")
