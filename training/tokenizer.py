"""Trains the tokenizer of the embedded models: a byte-level BPE that follows Python's line structure."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.corpus import CHAT_TEMPLATE, SPECIAL_TOKENS

# The number of tokens, special tokens included.
VOCABULARY = 4096
# A line break and the indentation after it form one piece: together they carry most of Python's structure.
PIECES = r"(?:\r?\n)+[ \t]*|[ _.]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[ \t]+(?=\S)|\s+"


def train_tokenizer(texts: Iterable[str], folder: Path, context_tokens: int) -> PreTrainedTokenizerFast:
    """Learns the merges from `texts`, and writes the tokenizer with its chat template to `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[0],
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        clean_up_tokenization_spaces=False,
        model_max_length=context_tokens,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast
