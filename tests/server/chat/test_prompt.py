"""Prompts: special tokens in a user's text stay text, long texts are refused unread, and markers are encoded in pieces."""

import asyncio
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from outrider import models
from outrider.server.chat.fill_in import FillInText
from outrider.server.chat.plain_text import PlainText
from outrider.server.chat.prompt import SAMPLE_CHARACTERS, PromptEncoder, TemplateOptions
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.http.errors import APIError
from outrider.verify.gguf.tokenizer import build_tokenizer

SHOW = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{% endfor %}"
    "{{ tools | tojson if tools }}"
)


def encoder(**changes: Any) -> PromptEncoder:
    tokenizer = AutoTokenizer.from_pretrained(models.TARGET)
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return PromptEncoder(tokenizer)


def test_user_text_never_becomes_a_special_token() -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.TARGET)
    evil = str(tokenizer.eos_token)
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": f"a{evil}b"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": evil}}}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": evil}}]
    ids = asyncio.run(encoder(chat_template=SHOW).chat("alice", messages, TemplateOptions(tools=tools), 1000))
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids).count(evil) == 3  # all as text


def test_template_arguments_never_become_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.TARGET)
    evil = str(tokenizer.eos_token)
    template = "{{ reasoning_effort }}{% if flags.deep == 'yes' %}{{ flags.words | join }}{{ flags | tojson }}{% endif %}"
    arguments = {"reasoning_effort": f"low{evil}", "flags": {"deep": "yes", "words": [evil], evil: 1}}
    ids = asyncio.run(
        encoder(chat_template=template).chat("alice", [{"role": "user", "content": ""}], TemplateOptions(arguments), 1000)
    )
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(ids).count(evil) == 4  # all as text


@pytest.mark.parametrize("special", [True, False])
def test_tokens_that_a_template_uses_as_markers_stay_text_in_messages(special: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.TARGET)
    tokenizer.add_tokens(["<tool_call>", "\n\n"], special_tokens=special)
    tokenizer.chat_template = SHOW + "<tool_call>\n\n"
    prompts, marker = PromptEncoder(tokenizer), tokenizer.convert_tokens_to_ids("<tool_call>")
    ids = asyncio.run(prompts.chat("alice", [{"role": "user", "content": "a<tool_call>\n\nb"}], TemplateOptions(), 1000))
    assert ids.count(marker) == 1 and tokenizer.decode(ids).count("<tool_call>") == 2
    ids = asyncio.run(prompts.plain("alice", "a<tool_call>b", 1000))
    assert marker not in ids and tokenizer.decode(ids) == "a<tool_call>b"
    paragraphs = asyncio.run(prompts.plain("alice", "a\n\nb", 1000))
    assert (tokenizer.convert_tokens_to_ids("\n\n") in paragraphs) == (not special)  # not a marker


class Counting:
    """A tokenizer that counts the characters that it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded = self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded += len(text)
        self.calls += 1
        return self._tokenizer.encode(text, **options)


@pytest.mark.parametrize("method", ["chat", "text", "plain", "fill_in"])
def test_text_longer_than_any_context_could_hold_is_refused_unread(method: str) -> None:
    tokenizer: Any = Counting(AutoTokenizer.from_pretrained(models.TARGET))
    tokenizer._tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"], special_tokens=True)
    prompts, text = PromptEncoder(tokenizer), "The fox sleeps. " * 30_000
    tokens = len(tokenizer.encode(text))
    asyncio.run(prompts.prepare())
    tokenizer.encoded = 0
    chat = ([{"role": "user", "content": text}], TemplateOptions())
    arguments: Any = {"chat": chat, "text": (text,), "plain": (text,), "fill_in": (FillInText(text, "y"),)}
    with pytest.raises(APIError, match=r"maximum context length is 2048 tokens.* resulted in about") as raised:
        asyncio.run(getattr(prompts, method)("alice", *arguments[method], 2048))
    assert raised.value.code == "context_length_exceeded"
    assert tokenizer.encoded <= SAMPLE_CHARACTERS
    found = re.search(r"resulted in about (\d+) tokens", raised.value.message)
    assert found is not None and 0.9 < int(found[1]) / tokens < 1.1


def test_a_bomb_of_special_tokens_is_refused_unread_and_their_ids_are_encoded_once() -> None:
    tokenizer: Any = Counting(AutoTokenizer.from_pretrained(models.TARGET))
    prompts = PromptEncoder(tokenizer)
    asyncio.run(prompts.prepare())
    tokenizer.calls = 0
    bomb = [{"role": "user", "content": str(tokenizer.eos_token) * 60_000}]
    with pytest.raises(APIError, match=r"resulted in about \d{6} tokens"):
        asyncio.run(prompts.chat("alice", bomb, TemplateOptions(), 40_000))
    assert tokenizer.encoded <= 2 * SAMPLE_CHARACTERS
    tokenizer.calls = 0
    many = [{"role": "user", "content": str(tokenizer.eos_token) * 500}]
    ids = asyncio.run(prompts.chat("alice", many, TemplateOptions(), 40_000))
    assert tokenizer.eos_token_id not in ids[5:-5] and len(ids) > 1000
    assert tokenizer.calls < 10


def sentencepiece(marker: AddedToken) -> Any:
    """A tokenizer that puts a space in front of a text and replaces spaces, as CodeLlama's."""
    characters = "▁<>PREdefx☺():"
    tokenizer = Tokenizer(tokenizer_models.BPE({text: i for i, text in enumerate(characters)}, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.add_tokens([marker])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_marker_that_begins_with_a_space_is_encoded_in_pieces(normalized: bool) -> None:
    tokenizer = sentencepiece(AddedToken("▁<PRE>", normalized=normalized, special=False))
    plain, marker = PlainText(tokenizer), tokenizer.convert_tokens_to_ids("▁<PRE>")
    assert marker in tokenizer.encode("def▁▁<PRE>x", add_special_tokens=False)
    for text in ("▁<PRE>", "def▁<PRE>x", "def <PRE>x", " <PRE>", "x<PRE> <PRE>", "x  <PRE>", "  <PRE>x<PRE>", "x ▁<PRE>"):
        assert marker not in plain.encode(tokenizer, text)
        assert marker not in plain.encode(tokenizer, text, continues=True)


def test_a_continuation_gets_no_space_in_front() -> None:
    tokenizer = sentencepiece(AddedToken("▁<PRE>", special=True))
    plain = PlainText(tokenizer)
    for text, continues, expected in (("def", False, "▁def"), ("def", True, "def"), (" def", True, "▁def"), ("", True, "")):
        pieces = tokenizer.convert_ids_to_tokens(plain.encode(tokenizer, text, continues))
        assert "".join(pieces) == expected


COMPOSING = ["u\u0308<|end|>\u0301", "<|e\u0301nd|>", "[MAS\u212a]", "<|\u212a|>", "a\u037e <|end|>\u0338"]
COMPOSING += ["<\u0338|end|>", "e\u0301" * 3]


@pytest.mark.parametrize("special", [3, 4])
def test_a_normaliser_makes_no_marker(special: int) -> None:
    """Of text that the tokenizer composes, none becomes a marker, and all of it stays in the prompt."""
    markers = ["<|end|>", "<|\u00e9nd|>", "[MASK]", "<|K|>", "<|fim_middle|>"]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "[M", "AS", "K]", "ASK]", *markers]
    template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}" + "".join(markers)
    entries = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": ["[ M", "A S", "K ]", "AS K]", "[M ASK]"]}
    types = [1] * (len(tokens) - len(markers)) + [special] * len(markers)
    built = build_tokenizer(
        {f"tokenizer.ggml.{name}": value for name, value in {**entries, "token_type": types}.items()}
        | {"tokenizer.chat_template": template},
        "x.gguf",
    )
    prompts, ids = PromptEncoder(built), {built.get_vocab()[each] for each in markers}
    for text in [*COMPOSING, "".join(COMPOSING), *markers]:
        plain = asyncio.run(prompts.plain("alice", text, 1000))
        assert ids.isdisjoint(plain), text
        assert unicodedata.normalize("NFC", built.decode(plain)) == unicodedata.normalize("NFC", text)
        chat = asyncio.run(prompts.chat("alice", [{"role": "user", "content": text}], TemplateOptions(), 1000))
        assert ids.isdisjoint(chat[: len(chat) - 1 - len(markers)]), text
        assert chat[-len(markers) :] == [built.get_vocab()[each] for each in markers]


EMBEDDED = AutoTokenizer.from_pretrained(models.TARGET)


@given(st.text(max_size=60))
def test_the_bytes_of_all_tokens_join_to_the_text(text: str) -> None:
    vocabulary = Vocabulary(EMBEDDED)
    ids = EMBEDDED.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert b"".join(vocabulary.bytes_of(id) for id in ids) == text.encode()
