"""Generates configs/default.yaml, the lists of docs/settings.md from the settings tree, and parts of docs/api.md
and docs/roofline.md.

After a change of a setting, of `outrider.server.openai.unsupported` or of bench/results/roofline.json or kernels.json, run
`python -m tests.docs.generated` to rewrite the files.
"""

import json
import re
import textwrap
from pathlib import Path

from bench import roofline as roofs
from outrider.server.openai.responses import schema as responses
from outrider.server.openai.unsupported import UNSUPPORTED, UNSUPPORTED_IN_CHATS, UNSUPPORTED_IN_COMPLETIONS
from outrider.server.settings.reference import Setting, SettingsSection, sections

ROOT = Path(__file__).parents[2]
DEFAULT_YAML = ROOT / "configs" / "default.yaml"
SETTINGS = ROOT / "docs" / "settings.md"
API = ROOT / "docs" / "api.md"
ROOFLINE = ROOT / "docs" / "roofline.md"

MANY_CHOICES = 20  # more of them are on another page, which the description names

HEADER = """\
# Every setting with its default. Generated from the settings tree; docs/settings.md has the types and bounds.
# Each setting also works in the environment (OUTRIDER_SERVER__PORT=9000) and as a flag (--server.port 9000).
"""


def default_yaml() -> str:
    """configs/default.yaml."""
    return HEADER + "".join(_yaml_section(section) for section in sections() if ".NAME" not in section.name)


def settings(page: str) -> str:
    """docs/settings.md with regenerated lists."""
    lists = "\n".join(_list(section) for section in sections())
    return _replace(page, "settings", f"\n{lists}")


def api(page: str) -> str:
    """docs/api.md with a regenerated list of unsupported fields."""
    endpoints = {
        "chats and completions": UNSUPPORTED,
        "chats": UNSUPPORTED_IN_CHATS,
        "completions": UNSUPPORTED_IN_COMPLETIONS,
        "responses": responses.UNSUPPORTED,
    }
    items = [f"- {name}: {', '.join(f'`{field}`' for field in fields)}" for name, fields in endpoints.items()]
    lines = [line for item in items for line in textwrap.wrap(item, 136, subsequent_indent="  ")]
    return _replace(page, "unsupported", "\n".join(["", *lines, ""]))


def roofline(page: str) -> str:
    """docs/roofline.md with regenerated tables."""
    results, compiled, before = (json.loads(file.read_text()) for file in (roofs.RESULT, roofs.COMPILED, roofs.BEFORE))
    page = _replace(page, "H200", f"\n{roofs.predictions_table(results, before, 'H200')}\n")
    page = _replace(page, "kernels", f"\n{roofs.kernels_table(compiled, before)}\n")
    return _replace(page, "aims", f"\n{roofs.aims_table(results)}\n")


def _replace(page: str, title: str, text: str) -> str:
    """The page with `text` between the comments of `title`."""
    begin, end = f"<!-- begin {title} -->", f"<!-- end {title} -->"
    return re.sub(f"{begin}.*{end}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


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


def _list(section: SettingsSection) -> str:
    lines = [f"## `{section.name}`", "", section.description, ""]
    for setting in section.settings:
        default = "required" if setting.required else f"`{setting.default}`" if is_value(setting) else setting.default
        many = len(setting.choices) > MANY_CHOICES
        kind = f"one of {len(setting.choices)} names" if many else setting.type.replace(" (", ", ").replace(")", "")
        lines.append(f"- `{setting.name}` ({kind}; {default}): {setting.description}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    DEFAULT_YAML.write_text(default_yaml())
    SETTINGS.write_text(settings(SETTINGS.read_text()))
    API.write_text(api(API.read_text()))
    ROOFLINE.write_text(roofline(ROOFLINE.read_text()))
