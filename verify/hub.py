"""Files of the Hugging Face hub, and the errors of its client. Imports the client when a file is not on this machine."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.verify.errors import ModelError
from outrider.verify.gguf.parts import parts_of

# The errors of the hub's client, and of the HTTP clients that its versions use.
MODULES = ("huggingface_hub.errors", "httpx", "httpx2", "requests.exceptions")
CONFIG = "config.json"


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """The exceptions of reading or downloading a file, and `others`, for an `except` clause. Imports nothing."""
    modules = [module for name in MODULES if (module := sys.modules.get(name)) is not None]
    found = {each for module in modules for each in vars(module).values() if isinstance(each, type)}
    return (OSError, ValueError, *others, *(each for each in found if issubclass(each, Exception) and each is not Exception))


def model_file(source: str, name: str, revision: str) -> Path:
    """A file of a model in a folder, or of a hub id, which is downloaded unless it is cached. Raises ModelError.

    The further files of a model in several are beside the first one then, too.
    """
    first, *_ = [_model_file(source, each, revision) for each in parts_of(name)]
    return first


def _model_file(source: str, name: str, revision: str) -> Path:
    if (file := Path(source) / name).exists():
        return file
    if Path(source).exists():
        raise ModelError(f"There is no file {str(file)!r}; download it again.")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(source, name, revision=revision))
    except hub_errors() as error:
        raise ModelError(f"{source}/{name} cannot be downloaded: {reason(error)}") from None


def model_folder(source: str, revision: str, patterns: Sequence[str], progress: type[Any] | None = None) -> Path:
    """A folder with the files of a model whose names fit the patterns: its own, or that of a hub id in the cache.

    Downloads what is not cached, with bars of the class `progress`. What the model has not is not there. Raises ModelError.
    """
    if Path(source).exists():
        return Path(source)
    from huggingface_hub import snapshot_download

    from outrider.verify.download import NoBar

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*patterns], tqdm_class=progress or NoBar))
    except hub_errors() as error:
        raise ModelError(f"{source} cannot be downloaded: {reason(error)}") from None


def here(source: str, name: str, revision: str) -> Path | None:
    """A file of a model in a folder, or in the cache of a hub id; None if it is not on this machine."""
    if Path(source).exists():
        file = Path(source) / name
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source, name, revision=revision)
    return Path(found) if isinstance(found, str) else None


def check_reachable(source: str, name: str | None, revision: str) -> None:
    """Downloads the configuration of a hub id, or the GGUF file `name`, unless it is cached. Raises ModelError.

    Without it, each process that loads the model would try, and say so. That a model has no configuration is for them to say.
    """
    if Path(source).exists():
        return
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        if here(source, name or CONFIG, revision) is None:
            hf_hub_download(source, name or CONFIG, revision=revision)
    except hub_errors() as error:
        is_offline = isinstance(error, OSError)  # EntryNotFoundError is one then, too
        if name is not None or is_offline or not isinstance(error, EntryNotFoundError):
            raise ModelError(f"{source} cannot be downloaded: {reason(error)}") from None


def reason(error: Exception) -> str:
    """The whole message in one line; the hub's first line is often a status only."""
    return " ".join(str(error).split())[:300]
