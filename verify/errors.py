"""Errors with a one-sentence message for the user."""

from __future__ import annotations

from pathlib import Path


class ModelError(ValueError):
    """The model cannot be served; the message says why."""


def check_path(path: str) -> None:
    """Raises ModelError for a path that transformers would mistake for a hub id."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "tokenizer.json").exists():
            raise ModelError(f"The folder {path!r} holds no model: it has neither config.json nor tokenizer.json.")
    elif folder.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {path!r}; give a model's folder, or a hub id such as Qwen/Qwen3-8B.")


def first_sentence(error: Exception) -> str:
    """The first line of an error's message, with at most 300 characters."""
    return " ".join(str(error).split("\n")[0].split())[:300]
