"""Whether a model writes text or is an encoder, by its configuration files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from outrider.verify.hub import here, hub_errors, model_file

Kind = Literal["embeddings", "rerank"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# The configuration of sentence-transformers, its list of modules, and that of transformers.
SENTENCE, MODULES, MODEL = "config_sentence_transformers.json", "modules.json", "config.json"


def kind_of(path: str, revision: str, download: bool) -> Kind | None:
    """The task of an encoder; None for any other model. Of a Hugging Face id, the files in its cache count, or with `download`
    those of the hub.
    """
    if path.endswith(".gguf"):
        return None
    sentence, modules, model = (read(path, revision, name, download) for name in (SENTENCE, MODULES, MODEL))
    if isinstance(sentence, Mapping) and sentence.get("model_type") == "CrossEncoder":
        return "rerank"
    if modules is not None or sentence is not None:
        return "embeddings"
    return kind_of_config(model) if isinstance(model, Mapping) else None


def kind_of_config(config: Mapping[str, Any]) -> Kind | None:
    """The task of a model that sentence-transformers did not save."""
    if config.get("model_type") == "model2vec":
        return "embeddings"
    listed = config.get("architectures")
    architecture = str(listed[0]) if isinstance(listed, list) and listed else ""
    if architecture.endswith("ForSequenceClassification"):
        return "rerank"
    return "embeddings" if architecture.endswith(("ForMaskedLM", "BertModel", "RobertaModel", "MPNetModel")) else None


def read(path: str, revision: str, name: str, download: bool) -> Any:
    """A JSON file of a model; None if it has none that can be read."""
    folder = Path(path).expanduser()
    source = str(folder) if folder.exists() else path
    try:
        file = model_file(source, name, revision) if download else here(source, name, revision)
        return None if file is None else json.loads(file.read_bytes())
    except hub_errors(RecursionError):
        return None
