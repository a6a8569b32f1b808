"""The longest end of a text that is the start of a marker."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.partial_match import overlap


@given(st.text("ab", max_size=8), st.text("ab", min_size=1, max_size=5))
def test_the_longest_overlap_is_found(text: str, marker: str) -> None:
    sizes = [size for size in range(len(marker)) if text.endswith(marker[:size])]
    assert overlap(text, marker) == max(sizes)
