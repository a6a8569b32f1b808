"""Small random models with the tokenizers of other families than the embedded model's, trained on a few sentences."""

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.gguf.tokenizer import QWEN2, TEKKEN
from outrider.verify.tokenizer import load_tokenizer

SENTENCES = [
    "Hello world, what's new? The capital of France is Paris.",
    "A fox and a hen are friends; they read a file of 1234 lines.",
    "naïve Übergröße, 日本語テスト, नमस्ते, мир",
]
LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


# A small BPE.
LETTERS = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}
MERGES = (("a", "b"), ("b", "c"))
PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}{{ eos_token }}{% endfor %}assistant:"


def bpe(vocabulary: dict[str, int], *merges: tuple[str, str]) -> AnyTokenizer:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocabulary, list(merges))))


def sentencepiece_model(path: Path, texts: Sequence[str] = SENTENCES * 20, **options: Any) -> None:
    """Writes a model of SentencePiece to `path`.model; unknown characters become bytes."""
    options = {"vocab_size": 400, "hard_vocab_limit": False, "character_coverage": 0.98, "byte_fallback": True, **options}
    options |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=path, **options)


def write_llama(folder: Path) -> None:
    """SentencePiece's BPE, which puts a space in front of each text, and removes it when it decodes."""
    sentencepiece_model(folder / "tokenizer", model_type="bpe")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    write_config(folder, LLAMA2, tokenizer_class="LlamaTokenizer", **names)


def write_gemma(folder: Path) -> None:
    """SentencePiece without a space in front, and with markers that are tokens of the user."""
    marks = ["<start_of_turn>", "<end_of_turn>"]
    sentencepiece_model(folder / "tokenizer", model_type="bpe", add_dummy_prefix=False, user_defined_symbols=marks)
    names = {"bos_token": "<s>", "eos_token": "<end_of_turn>", "unk_token": "<unk>", "pad_token": "<s>"}
    write_config(folder, GEMMA, tokenizer_class="GemmaTokenizer", **names)


def write_unigram(folder: Path) -> None:
    """SentencePiece's unigram model, as T5 has it."""
    sentencepiece_model(folder / "spiece", model_type="unigram", eos_id=1, bos_id=-1, unk_id=2, pad_id=0)
    write_config(folder, PLAIN, tokenizer_class="T5Tokenizer", eos_token="</s>", extra_ids=0)


def train_bytes(split: str) -> Tokenizer:
    """BPE over the bytes of words."""
    tokenizer = Tokenizer(BPE())
    words = pre_tokenizers.Split(Regex(split), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SENTENCES, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def write_qwen(folder: Path) -> None:
    """Byte-level BPE in tokenizer.json, with added tokens of which only some are special."""
    tokenizer = train_bytes(QWEN2)
    tokenizer.add_special_tokens([AddedToken(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None}
    write_config(folder, CHATML, tokenizer_class="Qwen2Tokenizer", **names)


def write_tekken(folder: Path) -> None:
    """Byte-level BPE in Mistral's own file, tekken.json."""
    tokenizer = train_bytes(TEKKEN)
    pieces = [bytes([byte]) for byte in range(256)]
    ranked = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    pieces += [
        tokenizer.decode([id]).encode() for piece, id in ranked if len(piece) > 1 and "\ufffd" not in tokenizer.decode([id])
    ]
    marks = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
    config = {"pattern": TEKKEN, "num_vocab_tokens": len(pieces), "default_vocab_size": len(pieces) + len(marks)}
    config |= {"default_num_special_tokens": len(marks), "version": "v7"}
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None} for rank, piece in enumerate(pieces)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(marks)]
    (folder / "tekken.json").write_text(json.dumps({"config": config, "vocab": vocab, "special_tokens": special}))
    write_config(folder, LLAMA2, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_config(folder: Path, template: str, **fields: Any) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **fields}))


FAMILIES: dict[str, Callable[[Path], None]] = {"llama": write_llama, "gemma": write_gemma, "unigram": write_unigram}
FAMILIES |= {"qwen": write_qwen, "tekken": write_tekken}


def write_model(folder: Path, family: str) -> None:
    """A random Llama of two layers with the family's tokenizer."""
    FAMILIES[family](folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral" if family == "tekken" else "llama"}))
    tokenizer = load_tokenizer(str(folder))
    if family == "llama":
        tokenizer.save_pretrained(folder)  # as published checkpoints have it, which transformers need not read
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 512}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": len(tokenizer)}
    config = LlamaConfig(**sizes, initializer_range=0.3, eos_token_id=tokenizer.eos_token_id)
    LlamaForCausalLM(config).save_pretrained(folder)
