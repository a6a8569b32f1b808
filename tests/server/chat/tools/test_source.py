"""What is read from a source depends on the text, not on its pieces; held text can be returned."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.server.chat.tools.source import Malformed, Reader, Source

Read = Callable[[Source, list[str]], Reader[object]]
READERS: list[Read] = [
    lambda source, taken: source.until(("<a>", "<ab>", "b"), taken.append),
    lambda source, taken: source.match("<a>"),
    lambda source, taken: source.word(),
    lambda source, taken: source.json(taken.append),
    lambda source, taken: source.run_space(taken.append),
    lambda source, taken: source.until_match(re.compile("[ab]"), taken.append),
]


def read(reader: Read, pieces: list[str]) -> tuple[object, str, str, str]:
    """The result, the text passed on, the held text, and the rest."""
    source, taken, held, rest = Source(), list[str](), list[str](), list[str]()
    source.hold(">")

    def run() -> Reader[object]:
        result: object = Malformed
        with suppress(Malformed):
            result = yield from reader(source, taken)
        held.append(source.release())
        yield from source.until((), rest.append)
        return result

    steps = run()
    for piece in pieces:
        source.feed(piece)
        next(steps, None)
    source.ended = True
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    return stopped.value.value, "".join(taken), "".join(held), "".join(rest)


@pytest.mark.parametrize("reader", READERS, ids=range(len(READERS)))
@given(text=st.text(st.sampled_from('<ab> {}[]",:1\\\n'), max_size=30), at=st.integers(0, 30))
def test_results_do_not_depend_on_pieces_and_no_text_is_lost(reader: Read, text: str, at: int) -> None:
    whole = read(reader, [text])
    assert whole[2] + whole[3] == ">" + text
    assert read(reader, [text[:at], text[at:]]) == whole
    assert read(reader, list(text)) == whole
