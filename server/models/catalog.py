"""The models that requests may name: those of `models.paths`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.server.encoders.kind import MODEL, MODULES, Kind, kind_of
from outrider.server.settings import Settings, SettingsError
from outrider.server.settings.models import locate_model
from outrider.server.settings.sources import with_sections
from outrider.verify.checkpoint import stored_bytes
from outrider.verify.errors import ModelError
from outrider.verify.model_names import is_model, resolve

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/.+\.gguf)?")


@dataclass(frozen=True)
class Entry:
    settings: Settings  # of this model
    size_bytes: int | None  # of the weights' files, with those of its draft model; None if they are not here yet
    kind: Kind | None = None  # what an encoder does; None also for a model whose files are not here yet

    @property
    def name(self) -> str:
        return self.settings.model.served_name

    @property
    def path(self) -> str:
        """The model's file, folder or id, like `model.path`."""
        return self.settings.model.path


def find_models(settings: Settings) -> dict[str, Entry]:
    """The models of `models.paths` by name, in order. Raises SettingsError, also for settings that belong to a single model."""
    for name, value in {"draft_model.path": settings.draft_model.path, "model.name": settings.model.name}.items():
        if value is not None:
            raise SettingsError(f"{name} belongs to one model; leave it out, or leave out models.paths.")
    found: dict[str, Entry] = {}
    for listed in settings.models.paths:
        shared, path = (settings, listed) if isinstance(listed, str) else own_settings(settings, listed)
        for each in expand(path):
            own = shared.model_copy(update={"model": shared.model.model_copy(update={"path": each})})
            draft, size = own.draft_model.place[0], stored_bytes(each)
            total = None if size is None else size + ((draft and stored_bytes(draft)) or 0)
            entry = Entry(own, total, kind_of(each, own.model.revision, download=False))
            other = found.get(entry.name, entry)
            if other.path != each:
                message = f"models.paths has two models named {entry.name!r}: {other.path} and {each}; rename one of them."
                raise SettingsError(message)
            if any(name != entry.name and name.casefold() == entry.name.casefold() for name in found):
                raise SettingsError(f"models.paths has two models named {entry.name!r} but for its case; rename one of them.")
            found[entry.name] = entry
    return found


def own_settings(shared: Settings, sections: Mapping[str, Any]) -> tuple[Settings, str]:
    """The settings of a model that differs from the others, and its path. Raises SettingsError."""
    own = with_sections(shared, sections, "models.paths")
    given = sections.get("model")
    if not isinstance(given, Mapping) or not given.get("path"):
        raise SettingsError("A model in models.paths needs its model.path.")
    return own, own.model.path


def expand(path: str) -> Iterator[str]:
    """The models of a path: itself, or those in its folder. Raises SettingsError."""
    try:
        located = Path(locate_model(path)).expanduser()
    except ValueError as error:
        raise SettingsError(f"models.paths: {error}.") from None
    if located.is_file() or is_checkpoint(located):
        yield str(located)
    elif located.is_dir():
        files = sorted(located.iterdir())
        models = [each for each in files if (each.is_file() and is_model(each.name)) or is_checkpoint(each)]
        if not models:
            raise SettingsError(f"{path} in models.paths holds no GGUF file and no folder with a config.json.")
        yield from map(str, models)
    elif HUB_ID.fullmatch(path):
        yield path
    else:
        yield named(path)


def named(path: str) -> str:
    """The path that another name of a model means. Raises SettingsError."""
    try:
        found = resolve(path).path
    except ModelError as error:
        raise SettingsError(f"models.paths: {error}") from None
    if not (Path(found).exists() or HUB_ID.fullmatch(found)):
        raise SettingsError(f"{path} in models.paths is no file, no folder and no Hugging Face id.")
    return found


def is_checkpoint(path: Path) -> bool:
    return any((path / name).is_file() for name in (MODEL, MODULES))
