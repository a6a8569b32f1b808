"""Later sessions of a principal draft from its earlier ones; nobody else does."""

import threading
from typing import Any

import numpy as np
import pytest

from outrider.drafters.interface import Ints
from outrider.drafters.library import learned
from outrider.drafters.library.learned import LearnedText
from outrider.drafters.registry import Resources, make
from outrider.drafters.sequence import Sequence
from outrider.drafters.tables.suffix import index
from outrider.server.worker.resources import LearnedTexts, Stores

VOCABULARY = 100
TEXT = np.arange(10, 60, dtype=np.int32)


def drafted(texts: LearnedTexts, principal: str, prompt: Ints) -> list[int]:
    """What fusion drafts first for a new session."""
    corpus = Stores([LearnedText(1, VOCABULARY)]).learning(texts.of(principal))
    drafter = make("fusion", Resources(corpus=corpus, vocabulary=VOCABULARY))
    drafter.begin(Sequence(prompt))
    tokens: list[int] = drafter.propose(4).tokens.tolist()
    return tokens


def test_a_later_session_drafts_what_an_earlier_one_said() -> None:
    texts = LearnedTexts(1000, VOCABULARY)
    texts.of("alice").add("first", TEXT)
    assert drafted(texts, "alice", TEXT[:3])[:2] == [13, 14]
    assert not {13, 14} & set(drafted(texts, "bob", TEXT[:3]))


def tokens(text: LearnedText) -> int:
    """The number of indexed tokens, separators not counted."""
    (block,) = text.current()
    return block.size - len(text._texts) if block.size else 0


def test_the_most_recent_texts_are_kept_up_to_the_bound() -> None:
    text = LearnedText(60, VOCABULARY)
    assert tokens(text) == 0
    text.add("old", TEXT[:20])
    text.add("new", TEXT[:40])
    assert tokens(text) == 60
    text.add("newer", TEXT[:30])  # "old" is dropped, and then "new", with which it would be too much
    assert tokens(text) == 30
    text.add("long", np.tile(TEXT, 3))
    assert tokens(text) == 60


def test_a_long_text_is_not_indexed_in_the_decode_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned, "MAX_TOKENS_IN_LOOP", 10)
    threads: list[threading.Thread] = []
    begin = threading.Event()

    def slow(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        begin.wait(60)
        return index(*arguments)

    monkeypatch.setattr(learned, "index", slow)
    begin.set()
    text = LearnedText(1000, VOCABULARY)
    begin.clear()
    text.add("a", TEXT)
    assert tokens(text) == 0  # it does not wait
    assert text._indexing is not None
    begin.set()
    text._indexing.result(60)
    assert tokens(text) == len(TEXT)
    assert threads[0] is threading.current_thread() and threads[1] is not threading.current_thread()
