"""Stores of sessions that save into a folder, and what is in that folder."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from outrider.drafters.registry import Resources, arrays_of
from outrider.drafters.sequence import Ints
from outrider.server.worker.sessions import SessionStore
from outrider.server.worker.storage.session_files import SessionFiles
from outrider.server.worker.storage.session_folder import PAGE, SESSION, hidden
from outrider.server.worker.storage.session_format import Fits
from outrider.verify.decode import finish
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream

LONG = np.arange(64, dtype=np.int32) % 90
OPTIONS = DecodeOptions(SamplingParams(temperature=0), max_tokens=6)


def new_store(
    runner: TorchRunner, folder: Path, model: str = "model", max_bytes: int = 1 << 30, **options: Any
) -> SessionStore:
    files = SessionFiles(folder, model, max_bytes, Fits.of(runner))
    return SessionStore(runner, **{"capacity": 4, "ttl_seconds": 60, "automatic": True, "files": files, **options})


def answer(
    store: SessionStore, prompt: Ints, name: str | None = None, principal: str = "p"
) -> tuple[int, Ints, dict[str, Any]]:
    """The number of reused tokens, the text with the answer, and the drafter's tables before it."""
    session = store.acquire(principal, name, prompt)
    assert session is not None
    drafter = session.drafter("trigram", Resources())
    tables = {key: array.copy() for key, array in arrays_of(drafter).items()}
    stream = Stream(session.verifier, drafter, prompt, OPTIONS)
    text = np.concatenate([prompt, np.array(finish(stream).tokens, np.int32)])
    store.release(session)
    return stream.reused_tokens, text, tables


def save(store: SessionStore) -> None:
    """Saves all sessions that have changed."""
    assert store._saver is not None
    while any(not (session.busy or session.saved) for session in store._sessions.values()):
        store.save()
        store._saver.wait(60)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*/*"))


def sessions_in(folder: Path) -> list[Path]:
    return [file for file in files_in(folder) if file.suffix == SESSION]


def pages_in(folder: Path) -> list[Path]:
    return [file for file in files_in(folder) if file.suffix == PAGE]


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in files_in(folder))


def content_of(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, "pt") as opened:
        return {key: opened.get_tensor(key).clone() for key in opened.keys()}, opened.metadata()  # noqa: SIM118


def page_of(name: str, folder: Path) -> Path:
    return next(file for file in sessions_in(folder) if file.stem == hidden(name))
