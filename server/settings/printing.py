"""Prints the settings: all of them as help text, and the effective ones as YAML with the origin of each value."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.server.settings.reference import Setting, as_yaml, sections
from outrider.server.settings.sources import EffectiveSettings


def print_reference(console: Console) -> None:
    """Every setting as a flag, with type, default and description, one panel per section."""
    for section in sections():
        rows = [row for setting in section.settings for row in (_flag(setting), _meaning(setting))]
        described = Group(Text(section.description, "dim"), *rows)
        console.print(Panel(described, title=Text(section.name, "bold"), title_align="left", border_style="dim"))


def effective_yaml(effective: EffectiveSettings) -> str:
    """The settings as YAML. A comment on each line names the origin of the value; API keys are masked."""

    def comment(name: str) -> str:
        parents = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
        return next((effective.origins[parent] for parent in parents if parent in effective.origins), "default")

    return "\n".join(_lines(effective.settings.model_dump(mode="json"), comment)) + "\n"


def changed_yaml(effective: EffectiveSettings) -> str:
    """The settings that are set, as YAML by their whole names. Texts, which may be secret or private, are left out."""
    values, lines = effective.settings.model_dump(mode="json"), []
    for setting in (each for section in sections() for each in section.settings):
        if setting.name in effective.origins or any(name.startswith(f"{setting.name}.") for name in effective.origins):
            value: Any = reduce(lambda tree, name: tree[name], setting.name.split("."), values)
            is_public = not isinstance(value, str | list | dict) or value in setting.choices
            lines.append(f"{setting.name}: {as_yaml(value) if is_public else '...'}\n")
    return "".join(lines)


def _flag(setting: Setting) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column()
    grid.add_row(Text(f"--{setting.name}", "bold cyan"), Text(setting.type, "yellow"))
    return grid


def _meaning(setting: Setting) -> Padding:
    default = "required" if setting.required else f"default: {setting.default}"
    return Padding(Text(f"{setting.description} ") + Text(f"[{default}]", "dim"), (0, 0, 0, 4))


def _lines(tree: Mapping[str, Any], comment: Callable[[str], str], prefix: str = "") -> list[str]:
    indent = "  " * prefix.count(".")
    lines: list[str] = []
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{as_yaml(name)}:", *_lines(value, comment, f"{prefix}{name}.")]
        else:
            lines.append(f"{indent}{as_yaml(name)}: {as_yaml(value)}  # {comment(prefix + name)}")
    return lines
