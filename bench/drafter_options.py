"""Drafter options as command-line flags of the benchmarks, such as `--trigram.depth 4` or `--draft.only_if_worth false`.

The server sets few of the options; experiments set any field of `outrider.drafters.options.Options`.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from bench.plan import BenchError
from outrider.drafters.options import Options

Changes = Mapping[str, Mapping[str, Any]]  # values by field, by drafter


def take_options(flags: Mapping[str, Any]) -> tuple[dict[str, Any], Changes]:
    """Splits flags (values by dotted name) into those of the settings, and changes of drafter options."""
    drafters = {drafter.name for drafter in fields(Options)}
    settings: dict[str, Any] = {}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in flags.items():
        drafter, _, option = name.partition(".")
        if drafter in drafters:
            changes.setdefault(drafter, {})[option] = value
        else:
            settings[name] = value
    return settings, changes


def change_options(options: Options, changes: Changes) -> Options:
    """The options with the changes, whose values may be text. Raises BenchError for unknown options and invalid values."""
    return replace(options, **{name: _changed(name, getattr(options, name), values) for name, values in changes.items()})


def _changed(drafter: str, options: Any, values: Mapping[str, Any]) -> Any:
    known = {each.name for each in fields(options)}
    unknown = next((name for name in values if name not in known), None)
    if unknown is not None:
        raise BenchError(f"There is no option --{drafter}.{unknown}; {drafter} has {', '.join(sorted(known))}.")
    try:
        return TypeAdapter(type(options)).validate_python({**vars(options), **values})
    except ValidationError as error:
        first = error.errors()[0]
        raise BenchError(f"--{drafter}.{first['loc'][0]} is invalid: {first['msg']}.") from None
