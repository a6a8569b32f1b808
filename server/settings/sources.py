"""Loads the settings: flags override the environment, the environment overrides the file, the file overrides the defaults.

A setting has one name in YAML (`speculation.drafter`), in the environment (`OUTRIDER_SPECULATION__DRAFTER`) and as a
flag (`--speculation.drafter`). Unknown names are errors. Nothing else in the project reads settings from the environment.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, InitSettingsSource, PydanticBaseSettingsSource
from pydantic_settings import SettingsError as UnreadableError

from outrider.drafters.options import NEED_A_MODEL
from outrider.models import packaged
from outrider.server.settings.access import Auth
from outrider.server.settings.reference import setting_names
from outrider.server.settings.section import SettingsError
from outrider.server.settings.tree import Settings

if TYPE_CHECKING:
    import yaml

Origin = Literal["default", "file", "environment", "flag"]
FILE: Origin = "file"
# The short flags of every command that takes settings as flags.
SHORT_FLAGS = {
    "model": "model.path",
    "draft_model": "draft_model.path",
    "drafter": "speculation.drafter",
    "host": "server.host",
    "port": "server.port",
}
# The sections in which one of several models may differ from the others.
OWN_SECTIONS = ("model", "draft_model", "speculation")


class Environment(EnvSettingsSource):
    """The settings in the environment, where one text stands for a list of it."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        is_text = isinstance(value, str) and not value.lstrip().startswith(("[", "{"))
        return value if is_text else super().decode_complex_value(field_name, field, value)


@dataclass(frozen=True)
class EffectiveSettings:
    """The settings, and the origin of each value by dotted name. Names that are missing in `origins` have their default."""

    settings: Settings
    origins: dict[str, Origin]


def load_settings(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Settings:
    """The settings from `file`, the environment and `flags` (values by dotted name). Raises SettingsError."""
    return load_effective(file, flags).settings


def load_effective(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> EffectiveSettings:
    """The settings and their origins. Raises SettingsError."""
    content = _read(file) if file else {}
    tree: dict[str, Any] = {}
    for name, value in (flags or {}).items():
        _insert(tree, name.split("."), value)

    class LayeredSettings(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, Environment(settings_cls), InitSettingsSource(settings_cls, content)

    try:
        values = dict(LayeredSettings(**tree))
        layers: dict[Origin, dict[str, Any]] = {"file": content, "environment": Environment(Settings)(), "flag": tree}
        origins: dict[str, Origin] = {name: origin for origin, layer in layers.items() for name in dotted_names(layer)}
        if values["auth"].file:
            values["auth"], key_names = _add_keys_from_file(values["auth"])
            origins = {**dict.fromkeys(key_names, FILE), **origins}
    except ValidationError as error:
        raise SettingsError(_sentence(error)) from None
    except UnreadableError as error:
        raise SettingsError(f"A setting in the environment cannot be read: {' '.join(str(error).split())}.") from None
    settings = Settings.model_construct(**values)
    _check(settings)
    return EffectiveSettings(settings, origins)


def load_served(file: Path | None = None, flags: Mapping[str, Any] | None = None) -> EffectiveSettings:
    """As `load_effective`; if no model is named, with SmolLM2's file, which may have to be fetched. Raises SettingsError."""
    found = load_effective(file, flags)
    if "model.path" in found.origins or found.settings.models.paths:
        return found
    path = packaged.place(packaged.SMOLLM2)
    model = found.settings.model.model_copy(update={"path": str(path)})
    return replace(found, settings=found.settings.model_copy(update={"model": model}))


def with_sections(settings: Settings, sections: Mapping[str, Any], setting: str) -> Settings:
    """The settings with other values in OWN_SECTIONS. Raises SettingsError, whose sentence names `setting`."""
    changed: dict[str, Any] = {}
    for name, values in sections.items():
        if name not in OWN_SECTIONS:
            raise SettingsError(f"A model in {setting} has the sections {', '.join(OWN_SECTIONS)}, not {name!r}.")
        section = getattr(settings, name)
        try:
            changed[name] = type(section).model_validate(_merged(section.model_dump(), values))
        except ValidationError as error:
            raise SettingsError(f"{setting}: {_sentence(error, name)}") from None
    found = settings.model_copy(update=changed)
    _check(found)
    return found


def _merged(tree: Mapping[str, Any], changes: Any) -> Any:
    """The tree with the leaves of another one."""
    if not isinstance(changes, Mapping):
        return changes
    return {**tree, **{name: _merged(tree.get(name) or {}, value) for name, value in changes.items()}}


def _check(settings: Settings) -> None:
    """Raises SettingsError if a setting needs another one that is missing, or if an adapter has the model's name."""
    if (settings.server.tls_certificate is None) != (settings.server.tls_key is None):
        given, missing = "tls_certificate", "tls_key"
        if settings.server.tls_certificate is None:
            given, missing = missing, given
        raise SettingsError(f"server.{given} needs server.{missing}; set both, or none for plain HTTP.")
    drafter, name = settings.speculation.drafter, settings.model.served_name
    if drafter in NEED_A_MODEL and settings.draft_model.path is None:
        raise SettingsError(f"The drafter {drafter!r} needs a draft model; set one with --draft-model.")
    if name in settings.model.adapters:
        raise SettingsError(f"model.adapters has {name!r}, which is the model's own name; give the adapter another one.")


def parse_flags(arguments: Sequence[str], options: Iterable[str] = ()) -> dict[str, Any]:
    """Parses `--section.name VALUE`, `--section.name=VALUE` and SHORT_FLAGS into values by dotted name.

    `options` are the command's other flags, which an error may suggest.
    Raises SettingsError.
    """
    found: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        flag = f"--{SHORT_FLAGS.get(_normalised(flag), flag[2:])}" if flag.startswith("--") else flag
        if not flag.startswith("--") or "." not in flag:
            if not flag.startswith("-"):
                raise SettingsError(f"{flag!r} is not a flag; if it is a model, give it as --model {flag}.")
            raise SettingsError(
                f"{flag!r} is not a flag{_did_you_mean(_nearest_flag(flag, options))} `outrider serve --help` lists all flags."
            )
        if not equals:
            if not rest:
                raise SettingsError(f"{flag} needs a value.")
            value = rest.pop(0)
        found[flag.removeprefix("--")] = None if value == "null" else value
    return found


def dotted_names(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The dotted names of all leaves of a tree of mappings."""
    names: list[str] = []
    for name, value in tree.items():
        names += dotted_names(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [f"{prefix}{name}"]
    return names


def _nearest_flag(flag: str, options: Iterable[str]) -> str | None:
    """The flag that a mistyped one resembles most; a setting's section may be missing."""
    flags: dict[str, str] = {}
    for name in setting_names():
        flags[name] = flags[name.rpartition(".")[2]] = f"--{name}"
    flags |= {_normalised(option): option for option in options}
    close = get_close_matches(_normalised(flag), flags, n=1)
    return flags[close[0]] if close else None


def _normalised(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _did_you_mean(name: str | None) -> str:
    return f"; did you mean {name}?" if name else ";"


def _add_keys_from_file(auth: Auth) -> tuple[Auth, list[str]]:
    """The section with the keys of `auth.file` added, and the dotted names of those keys. Raises SettingsError."""
    assert auth.file is not None
    keys = _read(auth.file)
    names = dotted_names(keys, "auth.keys.")
    try:
        return Auth.model_validate({**vars(auth), "keys": {**keys, **auth.keys}}), names
    except ValidationError as error:
        name = ".".join(str(part) for part in error.errors()[0]["loc"][1:])
        raise SettingsError(f"The key {name!r} in {auth.file} is invalid: {error.errors()[0]['msg']}.") from None


def _read(file: Path) -> dict[str, Any]:
    import yaml  # a server without a file of settings does without it

    try:
        content = yaml.load(file.read_text(), strict_loader()) or {}
    except OSError as error:
        raise SettingsError(f"The configuration file {file} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"The configuration file {file} is not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise SettingsError(f"The configuration file {file} must contain sections such as `model:` and `server:`.")
    return content


MERGE = "tag:yaml.org,2002:merge"


def strict_loader() -> "type[yaml.SafeLoader]":
    """Reads YAML whose keys are texts, each of which stands once in its section: else a setting or an API key would be lost."""
    import yaml

    class StrictLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen = set[str]()
            for key in (key for key, _ in node.value if key.tag != MERGE):
                name = self.construct_object(key, deep=True)
                problem = "is no text" if not isinstance(name, str) else "stands twice" if name in seen else ""
                if problem:
                    problem = f"the key {name!r} {problem}"
                    raise yaml.constructor.ConstructorError(problem=problem, problem_mark=key.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep)

    return StrictLoader


def _insert(tree: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise SettingsError(f"{'.'.join(parts)!r} cannot be set: {part!r} is not a section.")
    tree[parts[-1]] = value


def _sentence(error: ValidationError, *section: str) -> str:
    """The error message for a setting, in a tree or in a section of it."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in (*section, *first["loc"]))
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        near = next(iter(get_close_matches(name, setting_names(), n=1)), None)
        return f"There is no setting {name!r}{_did_you_mean(near)} `outrider serve --help` lists all settings."
    value = "" if "key" in name else f" (got {first['input']!r})"  # keys never appear in messages
    message = 'it takes a JSON list such as \'["a", "b"]\'' if first["type"] == "tuple_type" else first["msg"]
    return f"The setting {name!r} is invalid: {message.removeprefix('Value error, ')}{value}."
