"""Sessions of the real model are continued, forked and restored from disk; long prompts and several streams are served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.models import smollm2
from tests.integration.real.questions import CAPITAL, QUESTIONS, chat, text
from tests.servers import Served, serving

pytestmark = pytest.mark.slow
NEXT = "And which river flows through it?"


def turns(server: Served, session: str) -> list[dict[str, Any]]:
    """Two turns of a conversation in a session."""
    first = chat(server, CAPITAL, session_id=session)
    return [first, chat(server, NEXT, session_id=session, messages=history(first), max_tokens=40)]


def history(first: dict[str, Any]) -> list[dict[str, str]]:
    return [{"role": "user", "content": CAPITAL}, {"role": "assistant", "content": text(first)}]


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_session_is_continued(real: Served) -> None:
    first, second = turns(real, "continued")
    assert cached(second) >= first["usage"]["prompt_tokens"]
    fresh = chat(real, NEXT, session_id="fresh", messages=history(first), max_tokens=40)
    assert text(fresh) == text(second)


def test_a_session_is_forked(real: Served) -> None:
    shared = "You are given a long list. " + ", ".join(f"item {number}" for number in range(100))
    fields: dict[str, Any] = {"messages": [{"role": "system", "content": shared}], "max_tokens": 8}
    long_question = " ".join(QUESTIONS) * 2
    first, second = chat(real, long_question, **fields), chat(real, CAPITAL, **fields)
    assert cached(first) < 100 and 200 < cached(second) < second["usage"]["prompt_tokens"] - 10
    again = chat(real, long_question, **fields)  # the first session is as it was
    assert text(again) == text(first) and cached(again) == first["usage"]["prompt_tokens"] - 1


@pytest.mark.timeout(900)
def test_a_session_outlives_a_restart(file: str, tmp_path: Path) -> None:
    flags = ("--model", smollm2.NAME, "--sessions.folder", str(tmp_path))
    with serving(*flags) as server:
        first, second = turns(server, "kept")
    with serving(*flags) as server:
        again = chat(server, NEXT, session_id="kept", messages=history(first), max_tokens=40)
    assert text(again) == text(second)
    assert cached(again) >= first["usage"]["prompt_tokens"]
