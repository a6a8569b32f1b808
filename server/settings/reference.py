"""A flat list of every setting, for help texts and documentation. Derived from the tree's JSON schema."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from outrider.server.settings.tree import Settings


@dataclass(frozen=True)
class Setting:
    name: str  # dotted, such as server.port
    type: str  # type in words, such as "integer (0 to 65535)"
    choices: tuple[str, ...]  # the values of an enumeration
    required: bool
    default: str  # default as YAML or in words; empty if the setting is required
    description: str


@dataclass(frozen=True)
class SettingsSection:
    """A section of the tree, with the settings that are directly in it."""

    name: str  # dotted, such as speculation.trigram
    description: str
    settings: tuple[Setting, ...]


@cache
def sections() -> tuple[SettingsSection, ...]:
    schema = Settings.model_json_schema()
    return tuple(_sections(schema, schema["$defs"], ""))


@cache
def setting_names() -> tuple[str, ...]:
    return tuple(setting.name for section in sections() for setting in section.settings)


def as_yaml(value: Any) -> str:
    """A scalar or a list on one line of YAML."""
    import yaml  # a server without a file of settings does without it

    return yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("...\n").strip()


def _sections(schema: dict[str, Any], definitions: dict[str, Any], name: str) -> Iterator[SettingsSection]:
    prefix = f"{name}." if name else ""
    settings: list[Setting] = []
    nested: list[tuple[str, dict[str, Any]]] = []
    for key, field in schema["properties"].items():
        if "$ref" in field:
            nested.append((prefix + key, field))
        else:
            settings.append(_setting(prefix + key, field))
            if "$ref" in field.get("additionalProperties", {}):
                nested.append((f"{prefix}{key}.NAME", field["additionalProperties"]))
    if settings:
        yield SettingsSection(name, schema["description"], tuple(settings))
    for key, field in nested:
        yield from _sections(definitions[field["$ref"].rpartition("/")[2]], definitions, key)


def _setting(name: str, field: dict[str, Any]) -> Setting:
    alternatives = [each for each in field.get("anyOf", [field]) if each.get("type") != "null"]
    choices = tuple(choice for each in alternatives for choice in each.get("enum", [each["const"]] if "const" in each else ()))
    default = field.get("default", "")
    return Setting(
        name=name,
        type=" or ".join(_type(each) for each in alternatives),
        choices=choices,
        required="default" not in field,
        default=default if isinstance(default, str) else as_yaml(default),
        description=field["description"],
    )


def _type(schema: dict[str, Any]) -> str:
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return ", ".join(schema["enum"])
    if schema["type"] == "array":
        items = schema["items"]
        return "list of " + " and ".join(f"{_type(each)}s" for each in items.get("anyOf", [items]))
    name: str = "mapping" if schema["type"] == "object" else schema["type"]
    return name + _bounds(schema)


def _bounds(schema: dict[str, Any]) -> str:
    if "exclusiveMinimum" in schema:
        return f" (above {schema['exclusiveMinimum']})"
    if "maximum" in schema:
        return f" ({schema['minimum']} to {schema['maximum']})"
    return f" (from {schema['minimum']})" if "minimum" in schema else ""
