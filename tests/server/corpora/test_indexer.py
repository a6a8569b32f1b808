"""A change of a corpus has the outcome of indexing its texts anew, happens as a whole, and keeps to its bound."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.drafters.tables import datastore
from outrider.drafters.tables.suffix import sort_suffixes
from outrider.server.corpora.indexer import answer, read_listing
from outrider.server.corpora.messages import Change, NewDocument, Outcome

SEPARATOR = 50


def change(folder: Path, texts: dict[str, list[int]], removed: tuple[str, ...] = (), max_bytes: int = 1 << 20) -> Outcome:
    added = [NewDocument(path, str(ids), np.array(ids, np.uint32).tobytes()) for path, ids in texts.items()]
    return answer(Change(str(folder / "corpus"), "corpus", [*removed], added, SEPARATOR, "f", max_bytes))


Texts = st.dictionaries(st.sampled_from("abcdef"), st.lists(st.integers(0, 5), max_size=12), max_size=4)


@given(st.lists(st.tuples(Texts, st.sets(st.sampled_from("abcdef"), max_size=2)), min_size=1, max_size=4))
def test_changes_have_the_outcome_of_indexing_anew(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[dict[str, list[int]], set[str]]]
) -> None:
    folder, expected = tmp_path_factory.mktemp("corpora"), dict[str, list[int]]()
    for texts, removed in changes:
        outcome = change(folder, texts, tuple(removed))
        kept = {path: ids for path, ids in expected.items() if path not in texts and path not in removed}
        expected = kept | texts
        assert outcome.listing is not None, outcome
        assert {document.path for document in outcome.listing.documents} == expected.keys()
        assert outcome.listing.tokens == sum(map(len, expected.values()))
        block = datastore.open_block(folder / "corpus" / outcome.listing.block, "f")
        in_order = [expected[document.path] for document in outcome.listing.documents]
        text = np.array([token for ids in in_order if ids for token in (*ids, SEPARATOR)], np.uint32)
        assert np.array_equal(block.arrays["tokens"], text)
        assert len(text) == 0 or np.array_equal(np.sort(block.arrays["order"]), np.sort(sort_suffixes(text)))


def test_a_change_beyond_the_bound_leaves_the_corpus_as_it_was(tmp_path: Path) -> None:
    first = change(tmp_path, {"a": [1, 2, 3]})
    assert first.listing is not None
    outcome = change(tmp_path, {"b": [4] * 500}, max_bytes=first.size_bytes + 8)
    assert outcome.listing is None and outcome.size_bytes > first.size_bytes + 8
    assert read_listing(tmp_path / "corpus") == first.listing
    assert [path.name for path in (tmp_path / "corpus").glob("*.block")] == [first.listing.block]


def test_the_block_before_stays_for_requests_that_have_chosen_it(tmp_path: Path) -> None:
    blocks = [outcome.listing.block for token in range(3) if (outcome := change(tmp_path, {"a": [token]})).listing]
    assert sorted(path.name for path in (tmp_path / "corpus").glob("*.block")) == blocks[1:]


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "principal").mkdir()
    (tmp_path / "principal").chmod(0o777)
    assert "not this user's own" in change(tmp_path / "principal", {"a": [1]}).error


@pytest.mark.parametrize("damage", [b"", b"\xff" * 64, None])
def test_why_a_change_failed_names_no_file(tmp_path: Path, damage: bytes | None) -> None:
    """The front end logs it."""
    first = change(tmp_path, {"a": [1, 2, 3]})
    assert first.listing is not None
    block = tmp_path / "corpus" / first.listing.block
    block.unlink()
    if damage is None:
        block.mkdir()
    else:
        block.write_bytes(damage)
    error = change(tmp_path, {"b": [4]}).error
    assert error and str(tmp_path) not in error and "corpus" not in error
