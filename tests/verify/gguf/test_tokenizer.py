"""Tokenizers of GGUF files: the ids of the tokenizer that a file was written from."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from outrider import models
from outrider.server.chat.vocabulary import Vocabulary
from outrider.verify.errors import ModelError
from outrider.verify.gguf.tokenizer import COMPOSED, SPLITS, WHOLE_WORD_SPLITS, build_tokenizer
from outrider.verify.gguf.vocabulary import NORMAL, USER_DEFINED
from outrider.verify.tokenizer import load_tokenizer, stop_ids
from tests.tokenizers import sentencepiece_model
from tests.verify.model.cpu.native.files import add_entries, finish

TEXTS = [
    "Hello world, what's new? WE'VE 1234567 of 3.14",
    "def f(x):\n    return x[0]\n\n\n\tpass  # a  comment\r\n",
    "naïve Übergröße, 日本語テスト, नमस्ते, مرحبا, 🙂👩‍👩‍👧, a\u00a0b",
    "trailing   ",
    "x=\t\t3    12\n\n 1",
    "camelCaseText DeepSeek/path\n//// __init__",
    "\n",
]
CORPUS = [Path(__file__).read_text(), *TEXTS * 20]


def entries_of(tokens: list[str], types: list[int] | None = None, **others: Any) -> dict[str, Any]:
    given = {"tokens": tokens, "token_type": types or [NORMAL] * len(tokens), **others}
    return {f"tokenizer.ggml.{name}": value for name, value in given.items()}


def entries_from(tokenizer: Tokenizer, **others: Any) -> dict[str, Any]:
    """The entries of a byte-level tokenizer, of whose tokens the added ones are control tokens."""
    state = json.loads(tokenizer.to_str())
    added = {token["id"] for token in state["added_tokens"]}
    tokens = [str(tokenizer.id_to_token(id)) for id in range(tokenizer.get_vocab_size())]
    merges = [" ".join(pair) for pair in state["model"]["merges"]]
    return entries_of(tokens, [3 if id in added else 1 for id in range(len(tokens))], model="gpt2", merges=merges, **others)


@pytest.mark.parametrize("splits", [*SPLITS, *WHOLE_WORD_SPLITS])
def test_bpe_over_bytes_is_that_of_the_trained_tokenizer(splits: tuple[str, ...]) -> None:
    trained = Tokenizer(BPE(ignore_merges=splits in WHOLE_WORD_SPLITS))
    words: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    trained.pre_tokenizer = pre_tokenizers.Sequence([*words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, BpeTrainer(vocab_size=600, special_tokens=["<|end|>"], initial_alphabet=alphabet))
    for name in {**SPLITS, **WHOLE_WORD_SPLITS}[splits].split():
        built = build_tokenizer(entries_from(trained, pre=name, eos_token_id=0), "model.gguf")
        for text in [*TEXTS, "one<|end|>two"]:
            assert built.encode(text) == trained.encode(text).ids
            assert built.decode(built.encode(text)) == text
        assert built.decode(built.encode("one<|end|>two"), skip_special_tokens=True) == "onetwo"


def pieces(entries: dict[str, Any]) -> list[str]:
    built = build_tokenizer(entries, "x.gguf")
    return list(built.convert_ids_to_tokens(built.encode("12  1", add_special_tokens=False)))


def test_the_digits_of_smollm_stand_alone() -> None:
    tokens = [*pre_tokenizers.ByteLevel.alphabet(), "12", "\u0120\u0120"]
    entries = entries_of(tokens, model="gpt2", pre="smollm", merges=["1 2", "\u0120 \u0120"])
    assert pieces(entries) == ["1", "2", "\u0120\u0120", "1"]
    entries["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(entries) == ["12", "\u0120", "\u0120", "1"]


@pytest.fixture(scope="module", params=[True, False], ids=["with a space in front", "without"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model with byte fallback and a symbol of the user."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    options = {"model_type": "bpe", "vocab_size": 600, "split_digits": True, "allow_whitespace_only_pieces": True}
    lines = "\n".join(CORPUS).splitlines()
    mark = {"add_dummy_prefix": request.param, "user_defined_symbols": ["<mark>"]}
    sentencepiece_model(folder / "model", lines, **options, **mark)
    return sentencepiece.SentencePieceProcessor(model_file=f"{folder}/model.model")


def entries_of_pieces(trained: sentencepiece.SentencePieceProcessor) -> dict[str, Any]:
    ids = range(trained.get_piece_size())
    has_prefix = trained.id_to_piece(trained.encode("x")[0]).startswith("\u2581")
    tests = {2: trained.is_unknown, 3: trained.is_control, 6: trained.is_byte}
    types = [next((kind for kind, is_kind in tests.items() if is_kind(id)), NORMAL) for id in ids]
    types[trained.piece_to_id("<mark>")] = USER_DEFINED
    return entries_of(
        [trained.id_to_piece(id) for id in ids],
        types,
        model="llama",
        scores=[trained.get_score(id) for id in ids],
        bos_token_id=trained.bos_id(),
        eos_token_id=trained.eos_id(),
        add_space_prefix=has_prefix,
    )


def test_sentencepiece_is_that_of_its_own_library(trained: sentencepiece.SentencePieceProcessor) -> None:
    built = build_tokenizer(entries_of_pieces(trained), "model.gguf")
    assert built.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"} and built.unk_token is None
    for text in [*TEXTS, " one space in front", "  two", "tab\tand ☃ snow"]:
        expected = trained.encode(text)
        assert built.encode(text) == [trained.bos_id(), *expected]
        assert built.decode(expected) == text
    assert built.encode("a<mark>", add_special_tokens=False)[-1] == trained.piece_to_id("<mark>")
    assert built.decode(built.encode("a</s>"), skip_special_tokens=True) == "a"


def pieces_of_texts(tokens: list[str]) -> st.SearchStrategy[str]:
    parts = st.sampled_from(tokens).flatmap(lambda token: st.sampled_from([token[:2], token, token.replace("\u2581", " ")]))
    return st.lists(parts | st.text(max_size=3) | st.sampled_from([" ", "  ", "\n"]), max_size=8).map("".join)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), plain=st.booleans(), with_ends=st.booleans(), has_bytes=st.booleans())
def test_the_librarys_pieces_are_those_of_tokenizers(
    data: st.DataObject, plain: bool, with_ends: bool, has_bytes: bool, trained: sentencepiece.SentencePieceProcessor
) -> None:
    entries = entries_of_pieces(trained)
    if not has_bytes:  # characters without a token become the unknown one
        tokens = entries["tokenizer.ggml.tokens"]
        entries["tokenizer.ggml.tokens"] = [f"[{token}]" if token.startswith("<0x") else token for token in tokens]
    built = build_tokenizer(entries, "model.gguf")
    reference, text = built.backend_tokenizer, data.draw(pieces_of_texts(entries["tokenizer.ggml.tokens"]))
    reference.encode_special_tokens = plain
    ids = reference.encode(text, add_special_tokens=with_ends).ids
    assert built.encode(text, with_ends, split_special_tokens=plain) == ids
    assert built.decode(ids) == reference.decode(ids, skip_special_tokens=False)
    assert built.decode(ids, skip_special_tokens=True) == reference.decode(ids)


DECOMPOSED = ["Bu\u0308ro scho\u0308n", "Tie\u0302\u0301ng Vie\u0323\u0302t", "\u1112\u1161\u11ab\u1100\u116e\u11a8"]
DECOMPOSED += ["10 \u212b"]


@pytest.mark.parametrize("pre", sorted(name for names in {**SPLITS, **WHOLE_WORD_SPLITS}.values() for name in names.split()))
def test_text_is_normalised_as_the_family_does(pre: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, "<|im_e\u0301|>"]
    entries = entries_of(tokens, [*[NORMAL] * len(alphabet), 3], model="gpt2", pre=pre, merges=[])
    built = build_tokenizer(entries, "x.gguf")
    for text in [*TEXTS, *DECOMPOSED]:
        expected = unicodedata.normalize("NFC", text) if pre in COMPOSED else text
        assert built.decode(built.encode(text)) == expected
    assert built.encode("<|im_e\u0301|>") == [len(alphabet)] and len(built.encode("<|im_\u00e9|>")) > 1
    assert len(built.encode("<|im_e\u0301|>", split_special_tokens=True)) > 1


def test_a_family_without_a_named_split_is_known_by_its_architecture() -> None:
    entries = entries_of(sorted(pre_tokenizers.ByteLevel.alphabet()), model="gpt2", merges=[])
    for architecture, expected in (("gptneox", "\u00fc"), ("gpt2", "u\u0308"), ("llama", "u\u0308")):
        built = build_tokenizer({**entries, "general.architecture": architecture}, "x.gguf")
        assert built.decode(built.encode("u\u0308")) == expected


@pytest.mark.parametrize(
    ("templates", "expected"),
    [
        ({}, None),
        ({"": "a"}, "a"),
        ({".tool_use": "b"}, "b"),
        ({"": "a", ".tool_use": "b"}, {"default": "a", "tool_use": "b"}),
        ({".rag": "c", "": "a", ".tool_use": "b", "s": ["tool_use", "rag"]}, {"default": "a", "rag": "c", "tool_use": "b"}),
        ({".rag": "c", ".tool_use": "b"}, {"rag": "c", "tool_use": "b"}),
    ],
)
def test_chat_templates_have_names(tmp_path: Path, templates: dict[str, Any], expected: Any) -> None:
    entries = entries_from(load_tokenizer(str(models.TARGET)).backend_tokenizer, eos_token_id=0)
    write_tokenizer(
        tmp_path / "x.gguf", {**entries, **{f"tokenizer.chat_template{name}": each for name, each in templates.items()}}
    )
    built = load_tokenizer(str(tmp_path / "x.gguf"))
    assert built.chat_template == expected
    if "" in templates:
        assert built.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "a"
    assert built.eos_token_id in stop_ids(frozenset(), built)


def write_tokenizer(file: Path, entries: dict[str, Any]) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    add_entries(writer, entries)
    finish(writer)


@pytest.mark.parametrize(
    "kind", [{"model": "gpt2", "merges": []}, {"model": "llama", "scores": [0.0] * 3, "add_space_prefix": False}]
)
def test_a_process_that_only_reads_tokens_does_not_build_what_encodes_texts(kind: dict[str, Any]) -> None:
    built = build_tokenizer(entries_of(["<s>", "\u2581a", "\u0120b"], [3, 1, 1], bos_token_id=0, **kind), "x.gguf")
    read = Vocabulary(built)
    assert read.special == {"<s>": 0} and len(built) == 3 and not read.drops_space([1], continues=True)
    assert read.bytes_of(1) + read.bytes_of(2) in ("\u2581a b".encode(), " a\u0120b".encode())
    assert "backend_tokenizer" not in vars(built)


def test_texts_begin_and_end_as_the_file_says() -> None:
    entries = entries_of(["<s>", "</s>", "a"], [3, 3, 1], model="gpt2", merges=[], bos_token_id=0, eos_token_id=1)
    flags = "tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token"
    assert build_tokenizer(entries, "x.gguf").encode("a") == [2]
    assert build_tokenizer({**entries, flags[0]: True}, "x.gguf").encode("a") == [0, 2]
    both = build_tokenizer({**entries, flags[0]: True, flags[1]: True}, "x.gguf")
    assert both.encode("a") == [0, 2, 1] and both.encode("a", add_special_tokens=False) == [2]


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"model": "bert"}, "The tokenizer of 'x.gguf' is of the kind 'bert', which is read with llama.cpp; install it with"),
        ({"model": "gpt2", "pre": "new", "merges": []}, "splits text, 'new', is known to llama.cpp alone; install it with pip"),
        ({"model": "llama"}, "The tokenizer of 'x.gguf' has neither merges nor scores"),
    ],
)
def test_what_is_not_supported_is_one_sentence(entries: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        build_tokenizer(entries_of(["a"], **entries), "x.gguf")
    with pytest.raises(ModelError, match="of the kind None"):
        build_tokenizer({}, "x.gguf")
