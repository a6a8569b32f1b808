"""The longest end of a text that is the start of a marker."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.partial_match import overlap


def test_overlap() -> None:
    assert overlap("answer <to", "<tool>") == 3
    assert overlap("<tool>", "<tool>") == 0  # the complete marker is not a partial match
    assert overlap("", "<tool>") == 0
    assert overlap("aab", "abab") == 2
    assert overlap("x<", "<") == 0


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_the_longest_overlap_is_found(text: str, marker: str) -> None:
    sizes = [size for size in range(len(marker)) if text.endswith(marker[:size])]
    assert overlap(text, marker) == max(sizes)
