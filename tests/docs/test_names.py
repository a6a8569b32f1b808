"""What the documentation names exists, its commands and examples are valid, and its generated pages are up to date."""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
import typer
import yaml

from outrider.drafters.options import NAMES
from outrider.server.cli import add_plugins, app
from outrider.server.settings import Settings, load_settings, parse_flags
from outrider.server.settings.reference import sections, setting_names
from outrider.server.settings.sources import dotted_names
from tests.docs.generated import API, DEFAULT_YAML, ROOFLINE, SETTINGS, api, default_yaml, roofline, settings
from tests.docs.markdown import PAGE_NAMES, ROOT, anchors, blocks, fields, inline_code, links, matches, prose, read, routes

SECTIONS = {section.name for section in sections()}
TOP_SECTIONS = {name.partition(".")[0] for name in SECTIONS}
FOLDERS = ("server", "drafters", "verify", "bench", "models", "configs", "docker", "docs", "tests")


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_settings_exist(page: str) -> None:
    for code in inline_code(page):
        name = code.removeprefix("--").partition(" ")[0]
        if re.fullmatch(r"[a-z_]+(\.[a-zA-Z_]+)+", name) and name.partition(".")[0] in TOP_SECTIONS:
            assert name in setting_names() or name in SECTIONS or f"{name}.NAME" in SECTIONS, f"{page}: {name}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_environment_variables_are_settings(page: str) -> None:
    for variable in re.findall(r"OUTRIDER_\w+__\w+", read(page)):
        assert variable.removeprefix("OUTRIDER_").lower().replace("__", ".") in setting_names(), f"{page}: {variable}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_endpoints_exist(page: str) -> None:
    for method, path in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", read(page)):
        assert any(method == m and matches(template, path) for m, template in routes()), f"{page}: {method} {path}"


def test_all_endpoints_are_documented() -> None:
    items = [line.partition(": ")[0] for line in read("docs/api.md").splitlines() if line.startswith("- `")]
    named = [found for item in items for found in re.findall(r"`(GET|POST|DELETE) (/[^`]*)`", item)]
    for method, template in routes():
        assert any(method == m and matches(template, path) for m, path in named), (method, template)


def documented_fields(*headings: str) -> set[str]:
    """The fields that the lists below these headings of docs/api.md and docs/editors.md describe."""
    parts = re.split(r"^#+ (.+)$", prose("docs/api.md") + prose("docs/editors.md"), flags=re.M)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    items = [item for heading in headings for item in re.findall(r"^- ((?:`\w+`[,\s]*)+):\s", texts[heading], flags=re.M)]
    return {name for item in items for name in re.findall(r"`(\w+)`", item)}


HEADINGS = {"/v1/chat/completions": ["Generation", "Chat"], "/v1/completions": ["Generation", "Completions"]}
HEADINGS |= {"/v1/responses": ["Responses"], "/v1/messages": ["Messages"], "/infill": ["Generation", "Editors"]}


@pytest.mark.parametrize("path", HEADINGS)
def test_all_fields_are_documented(path: str) -> None:
    assert documented_fields(*HEADINGS[path]) == fields(path)


def test_all_drafters_are_documented() -> None:
    assert set(re.findall(r"^- `([a-z-]+)`: ", read("docs/drafters.md"), flags=re.M)) == set(NAMES)


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_files_exist(page: str) -> None:
    for code in inline_code(page):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*-]*", code):
            assert list(ROOT.glob(code.rstrip("/"))), f"{page}: {code}"


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_links_resolve(page: str) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), f"{page}: {link}"
        assert not anchor or anchor in anchors(target.relative_to(ROOT).as_posix()), f"{page}: {link}"


FILES = [(DEFAULT_YAML, lambda _: default_yaml()), (SETTINGS, settings), (API, api), (ROOFLINE, roofline)]


@pytest.mark.parametrize(("file", "generated"), FILES, ids=lambda each: getattr(each, "name", ""))
def test_a_file_is_up_to_date(file: Path, generated: Callable[[str], str]) -> None:
    assert file.read_text() == generated(file.read_text()), "run python -m tests.docs.generated"


BLOCKS = [block for page in PAGE_NAMES for block in blocks(page)]


@pytest.fixture(scope="module")
def group() -> Any:
    """The `outrider` command with the commands of all entry points."""
    add_plugins(app)
    return typer.main.get_command(app)


def command_lines() -> Iterator[str]:
    """The lines of shell blocks, continued lines joined, and inline commands."""
    for block in BLOCKS:
        if not block.language:
            yield from block.text.replace("\\\n", " ").splitlines()
    for page in PAGE_NAMES:
        yield from (code for code in inline_code(page) if re.match(r"(outrider|make|python -m) \w", code))


def outrider_lines() -> list[str]:
    """The arguments of every `outrider` command line."""
    lines = (
        re.search(r"(?:^|\s|bin/)outrider ((?:[a-z-]+ |-).*|[a-z-]+$)", line.partition(" #")[0].strip())
        for line in command_lines()
    )
    return sorted({match[1] for match in lines if match})


@pytest.mark.parametrize("line", outrider_lines())
def test_outrider_commands_and_flags_exist(group: Any, line: str) -> None:
    command, arguments = group, shlex.split(line.partition(" -- ")[0])  # what follows belongs to another program
    while arguments and not arguments[0].startswith("-") and hasattr(command, "commands"):
        assert arguments[0] in command.commands, f"outrider {line}: there is no command {arguments[0]!r}"
        command = command.commands[arguments.pop(0)]
    options = {name for parameter in command.params for name in parameter.opts}
    settings = []
    for number, argument in enumerate(arguments):
        if argument.startswith("--") and "." in argument:
            settings += arguments[number : number + 2]
        elif argument.startswith("--"):
            assert argument in options or argument in ("--help", "--install-completion"), f"outrider {line}: no {argument}"
    assert command.context_settings.get("allow_extra_args") or not settings
    flags = {name: value for name, value in parse_flags(settings).items() if "..." not in str(value)}
    load_settings(None, flags)


def test_urls_are_endpoints() -> None:
    urls = [url for block in BLOCKS for url in re.findall(r"http://127\.0\.0\.1:8000(/[\w./]*)", block.text)]
    assert urls
    for url in urls:
        path = urlparse(url).path
        assert path == "/v1" or any(matches(route, path) for _, route in routes()), path


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language], ids=lambda b: f"{b.page}-{b.language}")
def test_examples_are_valid(block: Any) -> None:
    match block.language:
        case "python":
            ast.parse(block.text)
        case "json":
            json.loads(block.text)
        case "toml":
            tomllib.loads(block.text)
        case "yaml":
            Settings.model_validate(yaml.safe_load(block.text))
            assert set(dotted_names(yaml.safe_load(block.text)))
        case other:
            pytest.fail(f"no check for {other} blocks")


def test_json_in_shell_commands_is_valid() -> None:
    bodies = [body for block in BLOCKS if not block.language for body in re.findall(r" -d '(.*?)'", block.text, flags=re.S)]
    assert bodies
    for body in bodies:
        json.loads(body)
