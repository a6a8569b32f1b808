"""Metadata and texts of GGUF files: equal to what the package `gguf` writes; broken files are one sentence."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.verify.errors import ModelError
from outrider.verify.gguf import texts
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.texts import LENGTH, Texts, ids_of, read_texts
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


def test_a_truncated_file_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for length in range(content.index(b"two.weight")):
        file.write_bytes(content[:length])
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


LISTS = st.lists(st.text(max_size=5) | st.sampled_from(["", "a", "\u2581a", "\0", "é"]), max_size=40)


@pytest.fixture(params=[True, False], ids=["library", "loop"], autouse=True)
def library(request: pytest.FixtureRequest) -> object:
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(texts, "LIBRARY", None)
        yield


def stored(given: list[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(each)) + each for each in given)


@given(LISTS)
def test_texts_are_read_and_found(given: list[str]) -> None:
    content = b"before" + stored([text.encode() for text in given]) + b"after"
    found, end = read_texts(content, 6, len(given))
    assert found == given and end == len(content) - 5 and len(found) == len(given)
    assert [found[at] for at in range(-len(given), 0)] == found[:] == given
    assert found.longest == max(map(len, given), default=0)
    ids: Mapping[str, int] = ids_of(found)
    expected = {text: id for id, text in enumerate(given)}
    assert dict(ids) == expected and len(ids) == len(expected)
    assert all(ids[text] == ids.get(text) == id for text, id in expected.items())
    assert "absent text" not in ids and ids.get("absent text", 7) == 7
    with pytest.raises(KeyError):
        ids["absent text"]
    assert Texts.of(given) == found


def test_what_is_no_text_is_replaced() -> None:
    broken = [b"\xff", "é".encode()[:1] + b"x", b"\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"fine"]
    found, _ = read_texts(stored(broken), 0, len(broken))
    assert [*found] == [text.decode("utf-8", "replace") for text in broken]
    assert ids_of(found)["fine"] == 5
