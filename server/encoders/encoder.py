"""The program of an encoder: sentence-transformers, in a process of its own.

Its priority is low, so that a stream of another model on the same cores goes on while texts are encoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding

from outrider.server.encoders.kind import MODEL, MODULES, check_classes, read
from outrider.server.encoders.messages import Embed, Failed, Load, Loaded, Score, Scores, Vectors, decode_request, encode
from outrider.server.engine.helper import answer_all

NICENESS = 10
# Texts of one forward. Those of a request are sorted by length, so a small batch has little padding.
CPU_BATCH, GPU_BATCH = 4, 32


def main(argument: str) -> None:
    """Answers requests from the socket until the front end closes it."""
    model: list[Embedder | Reranker] = []

    def answer(message: bytes) -> bytes:
        request = decode_request(message)
        try:
            if isinstance(request, Load):
                model[:] = [load(request)]
                return encode(model[0].loaded)
            return encode(model[0].answer(request))
        except Exception as error:  # also what a model's own code raises
            first_line = str(error).strip().partition("\n")[0]
            return encode(Failed(f"{type(error).__name__}: {first_line.rstrip('.')}"))

    answer_all(argument, answer, NICENESS)


def load(request: Load) -> Embedder | Reranker:
    """The model of a request.

    Raises ValueError for a classifier or untrusted classes, and whatever sentence-transformers raises.
    """
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    options: dict[str, Any] = {"device": request.device}
    if (
        request.kind == "embeddings"
        and (read(request.path, request.revision, MODEL, True) or {}).get("model_type") == "model2vec"
        and read(request.path, request.revision, MODULES, True) is None
    ):
        folder = request.path if Path(request.path).exists() else snapshot_download(request.path, revision=request.revision)
        return Embedder(SentenceTransformer(modules=[StaticEmbedding.from_model2vec(folder)], **options))
    revision = request.revision if request.trust_remote_code else check_classes(request.path, request.revision)
    options |= {"revision": revision, "trust_remote_code": request.trust_remote_code}
    if request.dtype != "auto":
        options["model_kwargs"] = {"dtype": request.dtype}
    if request.kind == "embeddings":
        return Embedder(SentenceTransformer(request.path, **options))
    model = CrossEncoder(request.path, **options)
    if model.num_labels != 1:
        raise ValueError(f"it has {model.num_labels} labels, and a reranker has one")
    return Reranker(model)


@dataclass(frozen=True)
class Embedder:
    model: SentenceTransformer

    @property
    def loaded(self) -> Loaded:
        return Loaded(self.model.get_embedding_dimension(), finite(self.model.max_seq_length))

    def answer(self, request: Embed) -> Vectors:
        """The vectors of texts, as sentence-transformers computes them. Raises ValueError if a number is not finite."""
        kinds: dict[str | None, Callable[..., Any]] = {"query": self.model.encode_query, "document": self.model.encode_document}
        found = kinds.get(request.input_type, self.model.encode)(
            request.texts,
            batch_size=batch_size(self.model),
            show_progress_bar=False,
            truncate_dim=request.dimensions,
            normalize_embeddings=request.dimensions is not None,
        )
        values = np.asarray(found, np.float32)
        if not np.isfinite(values).all():
            raise ValueError("the model computed NaN or infinity")
        prefix = self.model.prompts.get(request.input_type or self.model.default_prompt_name or "", "")
        return Vectors(values.tobytes(), lengths(self.model.tokenizer, [prefix + text for text in request.texts]))


@dataclass(frozen=True)
class Reranker:
    """A model that scores documents for queries."""

    model: CrossEncoder

    @property
    def loaded(self) -> Loaded:
        return Loaded(None, finite(self.model.max_length))

    def answer(self, request: Score) -> Scores:
        """The scores, as sentence-transformers computes them. Raises ValueError if one is not finite."""
        values = np.asarray(self.model.predict(request.pairs, batch_size=batch_size(self.model), show_progress_bar=False))
        if not np.isfinite(values).all():
            raise ValueError("the model computed NaN or infinity")
        return Scores(values.astype(float).tolist(), lengths(self.model.tokenizer, request.pairs))


def batch_size(model: torch.nn.Module) -> int:
    return CPU_BATCH if next(model.parameters()).device.type == "cpu" else GPU_BATCH


def finite(tokens: float | None) -> int | None:
    return None if tokens is None or tokens > 1 << 30 else int(tokens)


def lengths(tokenizer: Any, texts: Sequence[Any]) -> list[int]:
    """The tokens of each text, or of each pair of texts together."""
    if callable(tokenizer):
        return [len(ids) for ids in tokenizer(list(texts), verbose=False)["input_ids"]]
    return [len(found.ids) for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]
