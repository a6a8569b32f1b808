"""Tables are built from files and folders, and can be described."""

import json
from pathlib import Path

import numpy as np
import pytest

from outrider.drafters.options import RetrievalOptions
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.tables import datastore
from outrider.drafters.tables.array_file import ArrayFileError
from outrider.models import TARGET
from outrider.server import datastore_builder
from outrider.server.datastore_builder import DatastoreError
from outrider.verify.tokenizer import load_tokenizer
from tests.drafts import Driven

TOKENIZER = str(TARGET)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a.py").write_text("def add(left, right):\n    return left + right\n")
    (folder / "b.jsonl").write_text(json.dumps({"text": "def add(one, two):\n    return one\n"}) + "\n")
    (folder / "image.png").write_bytes(b"\x89PNG")
    return folder


def drafted(folder: Path, text: str) -> set[str]:
    tokenizer = load_tokenizer(TOKENIZER)
    drafter = Driven(RetrievalDrafter(datastore.load(folder), RetrievalOptions()))
    drafter.begin(np.array(tokenizer.encode(text), np.int32))
    tree = drafter.propose(32)
    return {tokenizer.decode(tree.path(row)) for row in range(len(tree))}


def test_a_suffix_datastore_is_built_and_appended_to(corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "store"
    made = datastore_builder.build_suffix([corpus], out, TOKENIZER, append=False)
    assert made.documents == 2
    assert "left" in drafted(out, "def add(")
    (tmp_path / "more.txt").write_text("def add(first, second):\n")
    assert datastore_builder.build_suffix([tmp_path / "more.txt"], out, TOKENIZER, append=True).documents == 3
    assert {"left", "first"} <= drafted(out, "def add(")
    datastore.merge(tmp_path / "both", [out, out])
    assert datastore.describe(tmp_path / "both").documents == 6
    assert datastore_builder.describe(out)["kind"] == "suffix"


def test_errors_are_sentences(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DatastoreError, match="no file or folder"):
        datastore_builder.find_files([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatastoreError, match="No text files"):
        datastore_builder.find_files([tmp_path / "empty"])
    with pytest.raises(ArrayFileError, match="not a datastore folder"):
        datastore_builder.build_suffix([corpus], tmp_path / "empty", TOKENIZER, append=True)
    with pytest.raises(ArrayFileError, match="is not a datastore file"):
        datastore_builder.describe(corpus / "image.png")
    with pytest.raises(ArrayFileError, match="not a datastore folder"):
        datastore.merge(tmp_path / "x", [tmp_path / "empty"])
