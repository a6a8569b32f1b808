"""A digest of the model to which a folder of saved sessions belongs."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF, locate
from outrider.verify.hub import here
from outrider.verify.model.runner import ModelRunner

# The version of the files' layout is part of the digest that names their folder, so files of another version are never read.
LAYOUT = 4


def model_digest(path: str, runner: ModelRunner, revision: str = DEFAULT_REVISION) -> str:
    """Identifies what determines a session's rows: the files of the weights, configuration, dtypes, shapes and versions."""
    location = locate(path, revision)
    folder = Path(location.source)
    if not folder.is_dir():  # a hub id; the cache has a folder per commit
        known = location.gguf or "config.json"
        folder = (here(location.source, known, revision) or Path(path)).parent
    weights = sorted(file for file in folder.glob("*") if file.suffix in (".safetensors", GGUF))
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    shape = runner.cache_shape
    parts = [LAYOUT, path, folder.name, files, runner.description, str(shape.dtype), str(shape.stored_dtype)]
    parts += [shape.device.type, shape.layers, runner.weight_bytes, version("outrider"), runner.library]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
