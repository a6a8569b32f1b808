"""Compiles all kernels into numba's cache while the image is built.

Kernels are compiled per argument types, which depend on the tables: here the embedded models with and without a datastore, a
model without a base table, and the builders of both kinds of tables.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from outrider import drafters, models
from outrider.server.datastore_builder import build_ngram, build_suffix
from outrider.server.settings import load_settings
from outrider.server.worker.kernels import Kernels
from outrider.server.worker.resources import Tables, load_resources
from outrider.server.worker.runtime import load


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
                "speculation.max_nodes": 8,  # auto would measure the build machine
                "speculation.retrieval.datastores": datastores,
            }
            settings = load_settings(None, flags)
            load(settings)
            if not datastores:
                others = Tables("of another tokenizer", vocabulary=1 << 16)
                Kernels(settings, background=False).load([load_resources(settings, others)[0]], others)


if __name__ == "__main__":
    main()
