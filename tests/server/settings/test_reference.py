"""The reference lists every setting of the tree, each with a type, a default and a description."""

import re
from typing import Any

import yaml

from outrider.server.settings import load_settings
from outrider.server.settings.reference import as_yaml, sections, setting_names
from outrider.server.settings.sources import dotted_names

SETTINGS = {setting.name: setting for section in sections() for setting in section.settings}


def test_every_setting_is_listed_once() -> None:
    names = [name for name in setting_names() if ".NAME." not in name]
    assert sorted(names) == sorted(dotted_names(load_settings().model_dump()))


def test_every_setting_and_section_is_described_in_sentences() -> None:
    for section in sections():
        for text in (section.description, *(setting.description for setting in section.settings)):
            assert re.fullmatch(r"\S[^\n]*\.", text), (section.name, text)


def test_defaults_match_the_tree() -> None:
    defaults = load_settings().model_dump(mode="json")
    for name, setting in SETTINGS.items():
        value: Any = defaults
        if name == "model.path" or ".NAME." in name:
            continue
        for part in name.split("."):
            value = value[part]
        assert yaml.safe_load(setting.default) == value, name


def test_types_name_choices_and_bounds() -> None:
    assert SETTINGS["server.port"].type == "integer (0 to 65535)"
    assert SETTINGS["model.compile"].type == "auto, on, off"
    assert SETTINGS["model.compile"].choices == ("auto", "on", "off")
    assert SETTINGS["speculation.max_nodes"].type == "auto or integer (0 to 128)"
    assert SETTINGS["speculation.retrieval.datastores"].type == "list of strings"
    assert SETTINGS["scheduling.queue_seconds"].type == "number (above 0)"
    assert SETTINGS["auth.keys.NAME.key"].required


def test_values_are_one_line_of_yaml() -> None:
    values: tuple[Any, ...] = (None, True, "on", "a: b", ["a", 1], 0.5, {}, "long " * 100)
    for value in values:
        text = as_yaml(value)
        assert "\n" not in text
        assert yaml.safe_load(text) == value
