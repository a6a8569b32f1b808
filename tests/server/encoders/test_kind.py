"""Which models are encoders, by the files that they consist of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider import models
from outrider.models import smollm2
from outrider.server.encoders.kind import Kind, kind_of

CASES: list[tuple[Kind | None, dict[str, Any]]] = [
    ("embeddings", {"modules.json": [], "config_sentence_transformers.json": {"prompts": {}}, "config.json": {}}),
    ("embeddings", {"config.json": {"model_type": "model2vec"}}),
    ("embeddings", {"config.json": {"architectures": ["ModernBertForMaskedLM"]}}),
    ("rerank", {"config.json": {"architectures": ["XLMRobertaForSequenceClassification"]}}),
    ("rerank", {"modules.json": [], "config_sentence_transformers.json": {"model_type": "CrossEncoder"}, "config.json": {}}),
    (None, {"config.json": {"architectures": ["LlamaForCausalLM"]}}),
    (None, {"config.json": {}}),
]


@pytest.mark.parametrize(("kind", "files"), CASES)
def test_kinds(tmp_path: Path, kind: Kind | None, files: dict[str, Any]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert kind_of(str(tmp_path), "main", download=False) == kind


@pytest.mark.parametrize("path", [str(models.TARGET), smollm2.FILE, "owner/never-downloaded", "../nothing", ""])
def test_models_that_write_text(path: str) -> None:
    assert kind_of(path, "main", download=False) is None
