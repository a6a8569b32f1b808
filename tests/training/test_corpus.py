"""The training text: functions become chats, data files are skipped, the order is fixed."""

from pathlib import Path

import pytest

from training import corpus
from training.corpus import Document, documents

FUNCTION = '''
@decorator
def add(left, right):
    """Add two numbers and return their sum.

    A second paragraph.
    """
    total = left + right
    return total
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package as the only source."""
    folder = tmp_path / "little"
    (folder / "tests").mkdir(parents=True)
    (folder / "__init__.py").write_text("VALUE = 'a module without functions'\n")
    (folder / "add.py").write_text(FUNCTION)
    (folder / "copy.py").write_text(FUNCTION)
    (folder / "table.py").write_text("TABLE = [" + "1234567890, " * 50 + "]\n")
    (folder / "tests" / "test_add.py").write_text("assert True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(corpus, "SOURCES", (corpus.Source("little", "MIT"), corpus.Source("not_installed", "MIT")))
    return folder


def test_documents_are_files_and_chats(package: Path) -> None:
    texts = sorted(document.text for document in documents())
    assert len(texts) == 3  # the copy, the table and the test are skipped
    chat, *files = texts
    assert all(text.endswith("<|end|>") for text in texts)
    assert [text.startswith(("@decorator", "VALUE")) for text in files] == [True, True]
    question, answer = chat.split("<|end|>\n<|assistant|>\n")
    assert question.startswith("<|user|>\n") and "Add two numbers and return their sum." in question
    assert answer == "```python\ndef add(left, right):\n    total = left + right\n    return total\n```<|end|>"


def test_the_order_is_fixed_by_the_seed(package: Path) -> None:
    assert documents(1) == documents(1)
    assert sorted(map(str, documents(1))) == sorted(map(str, documents(2)))


def test_a_file_and_its_chats_are_held_out_together(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "HELD_OUT_SHARE", 1.0)
    assert all(document.held_out for document in documents())
    assert Document("x", True) != Document("x", False)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 1\n",
        'def f():\n    """Too short."""\n    return 1\n',
        'def f():\n    """A docstring that is long enough."""\n',
        "def broken(:\n",
    ],
)
def test_unsuitable_functions_are_skipped(source: str) -> None:
    assert list(corpus._chats(source)) == []
