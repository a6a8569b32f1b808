"""Recorded answers and texts are loaded and tokenized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.plan import BenchError
from bench.recordings import load_corpus, load_encoder, load_resources, load_stream
from outrider.drafters.options import Options
from outrider.models import TARGET


class Letters:
    """Encodes each letter as its code point."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def __len__(self) -> int:
        return 128


def test_a_stream_and_its_reference(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    records = [
        {"prompt": "a", "response": "bc"},
        {"prompt": "", "response": "d", "rest_reference": {"new_tokens": 9, "steps": 6}},
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    lines, reference = load_stream(file, Letters(), None)
    assert [(line.prompt.tolist(), line.answer.tolist()) for line in lines] == [([97], [98, 99]), ([], [100])]
    assert reference == 1.5
    assert load_stream(file, Letters(), 1)[1] is None


def test_texts_are_separated(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("c")
    assert load_corpus([tmp_path], Letters()).tolist() == [128, 97, 98, 128, 99]
    assert load_resources([tmp_path], Letters(), Options()).vocabulary == 129
    assert load_resources([], Letters(), Options()).vocabulary == 129


def test_user_errors_are_reported(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    with pytest.raises(BenchError, match=r"Cannot read .*bad\.jsonl"):
        load_stream(tmp_path / "bad.jsonl", load_encoder(str(TARGET)), None)
    with pytest.raises(BenchError, match="no file or folder"):
        load_corpus([tmp_path / "none"], Letters())
    with pytest.raises(BenchError, match="not a sentencepiece model"):
        load_encoder("/no/such.model")
    with pytest.raises(BenchError):
        load_encoder("/no/such")
