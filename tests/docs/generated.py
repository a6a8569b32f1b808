"""Generates configs/default.yaml and the tables of docs/configuration.md from the settings tree.

After a change of a setting, run `python -m tests.docs.generated` to rewrite both files.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from server.settings.reference import Setting, SettingsSection, sections

ROOT = Path(__file__).parents[2]
DEFAULT_YAML = ROOT / "configs" / "default.yaml"
CONFIGURATION = ROOT / "docs" / "configuration.md"
BEGIN, END = "<!-- begin settings -->", "<!-- end settings -->"

HEADER = """\
# Every setting with its default. Generated from the settings tree; docs/configuration.md has the types and bounds.
# Each setting also works in the environment (OUTRIDER_SERVER__PORT=9000) and as a flag (--server.port 9000).
"""


def default_yaml() -> str:
    """configs/default.yaml."""
    return HEADER + "".join(_yaml_section(section) for section in sections() if ".NAME" not in section.name)


def configuration(page: str) -> str:
    """docs/configuration.md with regenerated tables."""
    tables = "\n".join(_table(section) for section in sections())
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{tables}\n{END}", page, flags=re.DOTALL)


def is_value(setting: Setting) -> bool:
    """Whether the default is YAML rather than a phrase such as "the embedded model"."""
    return not setting.default.startswith("the ")


def _yaml_section(section: SettingsSection) -> str:
    depth = section.name.count(".")
    indent = "  " * depth
    heading = f"{indent}{section.name.rpartition('.')[2]}:\n"
    blank = "\n" if depth == 0 else ""
    body = "".join(_yaml_setting(setting, indent + "  ") for setting in section.settings)
    return f"{blank}{_comment(section.description, indent)}{heading}{body}"


def _yaml_setting(setting: Setting, indent: str) -> str:
    choices = f" One of {', '.join(setting.choices)}." if len(setting.choices) > 1 else ""
    name = setting.name.rpartition(".")[2]
    line = f"{name}: {setting.default}" if is_value(setting) else f"# {name}: Qwen/Qwen3-8B  # default: {setting.default}"
    return f"{_comment(setting.description + choices, indent)}{indent}{line}\n"


def _comment(text: str, indent: str) -> str:
    lines = textwrap.wrap(text, 118 - len(indent), break_on_hyphens=False)
    return "".join(f"{indent}# {line}\n" for line in lines)


def _table(section: SettingsSection) -> str:
    lines = [
        f"### `{section.name}`",
        "",
        section.description,
        "",
        "| setting | type | default | description |",
        "|---|---|---|---|",
    ]
    for setting in section.settings:
        default = "required" if setting.required else f"`{setting.default}`" if is_value(setting) else setting.default
        lines.append(f"| `{setting.name}` | {setting.type} | {default} | {setting.description} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DEFAULT_YAML.write_text(default_yaml())
    CONFIGURATION.write_text(configuration(CONFIGURATION.read_text()))
