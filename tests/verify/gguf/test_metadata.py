"""Metadata of GGUF files: equal to what the package `gguf` writes; broken files are one sentence."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from outrider.verify.errors import ModelError
from outrider.verify.gguf.metadata import read_metadata
from tests.verify.model.cpu.native.files import finish


@pytest.fixture
def file(tmp_path: Path) -> Path:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_rope_freq_base(1e5)
    writer.add_token_list(["a", "é", "\u2581b"])
    writer.add_token_scores([0.5, -1.0, 0.0])
    writer.add_add_bos_token(True)
    for name, kind in (("blk.0.one.weight", "F32"), ("blk.2.two.weight", "Q4_0")):
        values = np.ones((16, 64), np.float32)
        kind = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    finish(writer)
    return tmp_path / "model.gguf"


def test_entries_and_sizes_are_read(file: Path) -> None:
    metadata = read_metadata(file)
    assert metadata.entries == {
        "general.architecture": "llama",
        "llama.block_count": 3,
        "llama.rope.freq_base": 1e5,
        "tokenizer.ggml.tokens": ["a", "é", "\u2581b"],
        "tokenizer.ggml.scores": [0.5, -1.0, 0.0],
        "tokenizer.ggml.add_bos_token": True,
    }
    assert metadata.bits_per_weight == (32 + 4.5) / 2  # Q4_0: 4 bits, and a scale of 16 for 32 weights


@pytest.mark.parametrize("length", [0, 3, 20, 60, 200])
def test_a_truncated_file_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ModelError, match=r"model.gguf' is not a complete GGUF file \(.+\); download it again"):
        read_metadata(file)


def test_a_damaged_length_is_refused(file: Path) -> None:
    content = file.read_bytes()
    start = content.index("é".encode()) - 8
    file.write_bytes(content[:start] + (1 << 62).to_bytes(8, "little") + content[start + 8 :])
    with pytest.raises(ModelError, match="it ends within a text"):
        read_metadata(file)


def test_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_text("{}" * 100)
    with pytest.raises(ModelError, match="it does not begin with GGUF"):
        read_metadata(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes([9, 0, 0, 0]) + bytes(100))
    with pytest.raises(ModelError, match="its version is 9"):
        read_metadata(tmp_path / "model.gguf")
