"""Bodies as careless clients write them."""

from __future__ import annotations

from tests.soak.attacks.encoding import encode, nested, raw


def test_bodies_may_have_what_the_json_module_does_not_write() -> None:
    assert encode({"a": nested(3), "b": float("nan")}) == b'{"a": [[[]]], "b": NaN}'
    assert encode([raw('{"x": "y"}'), "z"]) == b'[{"x": "y"}, "z"]'
    assert encode({"a": "\ud800"}) == b'{"a": "\\ud800"}'
