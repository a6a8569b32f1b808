"""Flags change the drafters' options, within their bounds."""

from __future__ import annotations

from typing import Any

import pytest

from bench.drafter_options import change_options, take_options
from bench.plan import BenchError
from outrider.drafters.options import Options


def test_flags_of_drafters_are_told_from_settings() -> None:
    flags = {"draft.steps": "4", "draft.only_if_worth": "false", "draft_model.path": "d", "speculation.max_nodes": "8"}
    settings, changes = take_options(flags)
    assert settings == {"draft_model.path": "d", "speculation.max_nodes": "8"}
    assert changes == {"draft": {"steps": "4", "only_if_worth": "false"}}


def test_options_are_changed_and_converted() -> None:
    found = change_options(Options(), {"draft": {"steps": "4", "only_if_worth": "false"}, "trigram": {"table": "my.ngram"}})
    assert (found.draft.steps, found.draft.only_if_worth, found.trigram.table) == (4, False, "my.ngram")
    assert found.draft_tree == Options().draft_tree
    assert change_options(Options(), {}) == Options()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"trigram": {"order": "2"}}, "no option --trigram.order; trigram has contexts, depth, search, table"),
        ({"trigram": {"depth": "33"}}, "--trigram.depth is invalid: Input should be less than or equal to 32"),
        ({"draft": {"steps": "many"}}, "--draft.steps is invalid"),
    ],
)
def test_unknown_and_invalid_options_are_refused(changes: Any, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        change_options(Options(), changes)
