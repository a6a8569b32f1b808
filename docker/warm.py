"""Compiles every kernel into numba's cache, once, while the image is built.

Kernels are compiled for the types they meet, and those depend on what is loaded: here the embedded models, with and without
a datastore, and what builds datastores.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import drafters
import models
from server.datastore_builder import build_ngram, build_suffix
from server.settings import load_settings
from server.worker.runtime import load


def main() -> None:
    texts = [Path(drafters.__file__).parent]
    target = str(models.TARGET)
    with tempfile.TemporaryDirectory() as name:
        table, store = Path(name) / "table.ngram", Path(name) / "store"
        build_ngram(texts, table, target, successors=12, max_megabytes=None)
        build_suffix(texts, store, target, append=False)
        for datastores in ([], [str(store)]):
            flags = {
                "draft_model.path": str(models.DRAFT),
                "speculation.max_nodes": 8,  # auto would measure this machine, which says nothing about the next
                "speculation.retrieval.datastores": datastores,
            }
            load(load_settings(None, flags))


if __name__ == "__main__":
    main()
