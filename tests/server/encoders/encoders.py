"""Small encoders with random weights, saved as users have them."""

from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizer

MAX_TOKENS, DIMENSIONS = 32, 32
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
PROMPTS = {"query": "find ", "document": ""}


def save_all(folder: Path) -> None:
    """`embedder`, of sentence-transformers, with prompts; `static`, of model2vec; `reranker` and `classifier`."""
    from model2vec import StaticModel
    from sentence_transformers import SentenceTransformer  # takes seconds
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    tokenizer = BertTokenizer(vocab={word: index for index, word in enumerate(WORDS)})
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=DIMENSIONS,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder / "bert")
    tokenizer.save_pretrained(folder / "bert")
    modules = [Transformer(str(folder / "bert"), max_seq_length=MAX_TOKENS), Pooling(DIMENSIONS), Normalize()]
    SentenceTransformer(modules=modules, prompts=PROMPTS).save_pretrained(str(folder / "embedder"))
    for name, labels in {"reranker": 1, "classifier": 3}.items():
        config.num_labels = labels
        BertForSequenceClassification(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    vectors = np.random.default_rng(0).normal(size=(len(WORDS), DIMENSIONS)).astype(np.float32)
    StaticModel(vectors, tokenizer.backend_tokenizer).save_pretrained(str(folder / "static"))
