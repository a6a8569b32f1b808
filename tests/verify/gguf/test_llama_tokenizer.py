"""Tokenizers of GGUF files by llama.cpp: the ids of those that are built here, and files that only llama.cpp can read."""

from pathlib import Path
from random import Random
from typing import Any
from unicodedata import normalize

import gguf
import pytest

from outrider.server.chat.vocabulary import Vocabulary
from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.gguf import llama_package
from outrider.verify.gguf import tokenizer as built
from outrider.verify.gguf.llama_tokenizer import LlamaTokenizer
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.tokenizer import SPLITS, WHOLE_WORD_SPLITS, build_tokenizer
from outrider.verify.gguf.vocabulary import Vocabulary as FileVocabulary
from outrider.verify.tokenizer import fingerprint, gguf_tokenizer
from tests.hub import installed
from tests.verify.gguf.test_tokenizer import TEXTS, write_tokenizer
from tests.verify.model.cpu.native.files import finish

pytest.importorskip("llama_cpp")
pytestmark = [pytest.mark.llama, pytest.mark.xdist_group("llama")]
FAMILIES = [name for table in (SPLITS, WHOLE_WORD_SPLITS) for families in table.values() for name in families.split()]
LETTERS = "abcXYZ 0123456789 \n\t\r'.,!?/-_éßΩж日本カ🙂한́ाा١²"
MARKED = ["<|im_start|>user\nhi<|im_end|>\n", "", *TEXTS]


def random_texts(count: int) -> list[str]:
    random = Random(1)
    return ["".join(random.choices(LETTERS, k=40)) for _ in range(count)]


@pytest.fixture(scope="module")
def file() -> Path:
    return installed()


@pytest.fixture(scope="module")
def both(file: Path) -> tuple[AnyTokenizer, LlamaTokenizer]:
    """SmolLM2's tokenizer, built and by llama.cpp."""
    entries = read_metadata(str(file)).entries
    return build_tokenizer(entries, str(file)), LlamaTokenizer(str(file), FileVocabulary(entries, str(file)))


def test_it_is_the_tokenizer_that_is_built(both: tuple[AnyTokenizer, LlamaTokenizer]) -> None:
    ours, theirs = both
    for text in [*MARKED, *random_texts(100)]:
        for adds in (True, False):
            for splits in (True, False):
                ids: Any = ours.encode(text, add_special_tokens=adds, split_special_tokens=splits)
                assert theirs.encode(text, add_special_tokens=adds, split_special_tokens=splits) == ids
                assert theirs.decode(ids) == ours.decode(ids)
                assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids, skip_special_tokens=True)
    known, found = Vocabulary(ours), Vocabulary(theirs)
    assert [known.bytes_of(id) for id in range(len(ours))] == [found.bytes_of(id) for id in range(len(theirs))]
    assert known.special == found.special and fingerprint(ours) == fingerprint(theirs)
    messages = [{"role": "user", "content": "hi"}]
    assert theirs.apply_chat_template(messages, tokenize=False) == ours.apply_chat_template(messages, tokenize=False)
    assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_token_id, ours.eos_token_id)


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"default"}))
def test_families_split_texts_as_llama_cpp_does(file: Path, tmp_path: Path, name: str) -> None:
    """With a part of SmolLM2's vocabulary. For files that name no split, llama.cpp has one that is no model's.

    llama.cpp does not compose characters, as the families' own tokenizers do: it gets composed text.
    """
    entries = read_metadata(str(file)).entries
    tokens = entries["tokenizer.ggml.tokens"][:3000]
    merges = [pair for pair in entries["tokenizer.ggml.merges"] if {*pair.split(" "), pair.replace(" ", "")} <= {*tokens}]
    part = {"tokens": tokens, "token_type": entries["tokenizer.ggml.token_type"][:3000].tolist(), "merges": merges, "pre": name}
    path = tmp_path / "part.gguf"
    write_tokenizer(path, {f"tokenizer.ggml.{key}": value for key, value in {**part, "model": "gpt2"}.items()})
    found = read_metadata(str(path)).entries
    ours, theirs = build_tokenizer(found, str(path)), LlamaTokenizer(str(path), FileVocabulary(found, str(path)))
    for text in [*TEXTS, *random_texts(100)]:
        composed = normalize("NFC", text) if name in built.COMPOSED else text
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(composed, add_special_tokens=False)


def write_rwkv(path: Path) -> None:
    """A vocabulary of a kind that is not built here: the bytes, and three words."""
    writer = gguf.GGUFWriter(path, "rwkv6")
    writer.add_tokenizer_model("rwkv")
    tokens = ["<s>", *(f"\\x{byte:02x}" for byte in range(1, 256)), "hello", " world", "日本"]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (len(tokens) - 1))
    writer.add_eos_token_id(0)
    finish(writer)


def test_a_kind_that_is_not_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "rwkv.gguf")
    write_rwkv(Path(path))
    found = gguf_tokenizer(path, path)
    assert isinstance(found, LlamaTokenizer)
    assert found.encode("hello world") == [256, 257]
    assert found.encode("<s>日本x") == [0, 258, 120]
    assert found.decode(found.encode("é🙂")) == "é🙂" and Vocabulary(found).bytes_of(195) == b"\xc3"
    monkeypatch.setattr(llama_package, "is_installed", lambda: False)
    with pytest.raises(ModelError, match="install it with pip install llama-cpp-python"):
        gguf_tokenizer(path, path)


def test_a_file_that_llama_cpp_cannot_read_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "new.gguf"
    write_tokenizer(path, {"tokenizer.ggml.model": "of 2040", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(ModelError, match=r"llama\.cpp cannot read the tokenizer of .*; serve the model's folder"):
        gguf_tokenizer(str(path), str(path))
