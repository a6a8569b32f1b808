"""Errors that end in one sentence for the user."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """The model cannot be served; the message says why and what to do."""


def check_path(path: str) -> None:
    """Says what is wrong with a path before transformers takes it for a hub id. Raises ModelError."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "tokenizer.json").exists():
            raise ModelError(f"The folder {path!r} holds no model: it has neither config.json nor tokenizer.json.")
    elif folder.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {path!r}; give a model's folder, or a hub id such as Qwen/Qwen3-8B.")


def first_sentence(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:300]
