"""`keep_alive`: numbers, durations, and what is neither."""

import math
from typing import Any

import pytest

from outrider.server.ollama.schema import seconds_of


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        (2.5, 2.5),
        ("0", 0),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        (-1, math.inf),
        ("-1m", math.inf),
        (10**400, math.inf),
    ],
)
def test_durations(given: Any, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", True, [], "5mm"])
def test_what_is_no_duration(given: Any) -> None:
    with pytest.raises(ValueError, match="a number of seconds, or a duration"):
        seconds_of(given)
