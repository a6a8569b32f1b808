"""Flags change the drafters' options, within their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.drafter_options import change_options, take_options
from bench.plan import BenchError
from outrider.drafters.options import Options


def test_flags_of_drafters_are_told_from_settings() -> None:
    flags = {"draft.gamma": "4", "draft.only_if_worth": "false", "draft_model.path": "d", "speculation.max_nodes": "8"}
    settings, changes = take_options(flags)
    assert settings == {"draft_model.path": "d", "speculation.max_nodes": "8"}
    assert changes == {"draft": {"gamma": "4", "only_if_worth": "false"}}


def test_options_are_changed_and_converted() -> None:
    found = change_options(Options(), {"draft": {"gamma": "4", "only_if_worth": "false"}, "trigram": {"search": "mcts"}})
    assert (found.draft.gamma, found.draft.only_if_worth, found.trigram.search) == (4, False, "mcts")
    assert found.draft_tree == Options().draft_tree
    assert change_options(Options(), {}) == Options()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trigram": {"orders": "2"}}, "no option --trigram.orders; trigram has adaptive, c1,"),
        ({"trigram": {"order": "5"}}, "--trigram.order is invalid: Input should be less than or equal to 4"),
        ({"draft": {"gamma": "many"}}, "--draft.gamma is invalid"),
    ],
)
def test_unknown_and_invalid_options_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        change_options(Options(), changes)
