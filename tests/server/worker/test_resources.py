"""The tables that drafters get."""

from __future__ import annotations

from pathlib import Path

import pytest

import models
from drafters.registry import Resources
from drafters.tables.array_file import ArrayFileError
from drafters.tables.ngram import empty_base
from server.settings import load_settings
from server.worker.resources import Tables, distinct, load_resources
from verify.tokenizer import fingerprint, load_tokenizer


def sizes(resources: Resources) -> list[int]:
    return [len(array) for array in resources.base]


def test_the_embedded_table_needs_the_embedded_tokenizer() -> None:
    embedded = fingerprint(load_tokenizer(str(models.TARGET)))
    ours, own = load_resources(load_settings(), Tables(embedded, 5000))
    theirs, _ = load_resources(load_settings(), Tables("another", 5000))
    empty = [len(array) for array in empty_base()]
    assert sizes(theirs) == empty
    assert sum(sizes(ours)) > sum(empty)
    assert ours.vocabulary == 5000 and not own


def test_a_configured_table_must_load(tmp_path: Path) -> None:
    settings = load_settings(None, {"speculation.trigram.table": str(tmp_path / "missing.ngram")})
    with pytest.raises(ArrayFileError):
        load_resources(settings, Tables("any", 100))


def test_resources_are_distinct_by_number_of_blocks() -> None:
    one, two, other = Resources(), Resources(), Resources(corpus=[object()])  # type: ignore[list-item]
    assert len(distinct([one, two])) == 1
    assert distinct([one, two, other])[-1] is other
