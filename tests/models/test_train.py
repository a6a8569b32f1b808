"""The recipe of the embedded models: texts are the same each time, and steps learn."""

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.models.embedded import documents as texts
from outrider.models.embedded import train
from outrider.models.embedded.train import SPECIAL_TOKENS, Learner, bits_per_byte, build_model, train_tokenizer
from outrider.verify.tokenizer import load_tokenizer

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
    monkeypatch.setattr(texts, "SOURCES", (texts.Source("little", "MIT"), texts.Source("not_installed", "MIT")))
    return folder


def test_documents_are_files_and_chats(package: Path) -> None:
    found = sorted(document.text for document in texts.documents())
    assert len(found) == 3  # the copy, the table and the test are skipped
    chat, *files = found
    assert all(text.endswith("<|end|>") for text in found)
    assert [text.startswith(("@decorator", "VALUE")) for text in files] == [True, True]
    question, answer = chat.split("<|end|>\n<|assistant|>\n")
    assert question.startswith("<|user|>\n") and "Add two numbers and return their sum." in question
    assert answer == "```python\ndef add(left, right):\n    total = left + right\n    return total\n```<|end|>"


TEXT = "def add(left, right):\n    return left + right\n\n\n"


def test_texts_round_trip_and_line_breaks_are_one_token(tmp_path: Path) -> None:
    train_tokenizer([TEXT] * 20, tmp_path, context_tokens=64)
    tokenizer = load_tokenizer(str(tmp_path))
    assert [*map(tokenizer.backend_tokenizer.token_to_id, SPECIAL_TOKENS)] == [0, 1, 2, 3]
    for text in (TEXT, "naïve ☃\tx", "while True:\n    pass"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("\n    ", add_special_tokens=False)) == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>\nhi<|end|>\n<|assistant|>\n"


SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


def learner() -> Learner:
    torch.manual_seed(0)
    return Learner(SHAPE, "cpu", compiled=False)


def test_steps_lower_the_loss() -> None:
    tokens = torch.arange(66).reshape(2, 33)
    model = learner()
    losses = [model.step(tokens, 1.0) for _ in range(5)]
    assert losses[-1] < losses[0]


def test_training_stops_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "BATCH_TOKENS", 64)
    monkeypatch.setattr(train, "SHORT_WINDOW_TOKENS", 32)
    monkeypatch.setattr(train, "CONTEXT_TOKENS", 32)
    assert train.train((learner(), learner()), np.arange(1000, dtype=np.uint16), 0.06) >= 64


def test_a_uniform_model_takes_twelve_bits_per_token() -> None:
    model = build_model(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    bits = bits_per_byte(model, np.arange(101, dtype=np.uint16), 100, "cpu")
    assert bits == pytest.approx(12.0, abs=1e-3)  # 4096 tokens, one byte each
