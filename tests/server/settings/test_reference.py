"""The reference lists every setting of the tree, each with a type, a default and a description."""

from typing import Any

import yaml

from outrider.server.settings import load_settings
from outrider.server.settings.reference import sections, setting_names
from outrider.server.settings.sources import dotted_names

SETTINGS = {setting.name: setting for section in sections() for setting in section.settings}


def test_every_setting_is_listed_once() -> None:
    names = [name for name in setting_names() if ".NAME." not in name]
    assert sorted(names) == sorted(dotted_names(load_settings().model_dump()))


def test_defaults_match_the_tree() -> None:
    defaults = load_settings().model_dump(mode="json")
    for name, setting in SETTINGS.items():
        value: Any = defaults
        if name == "model.path" or ".NAME." in name:
            continue
        for part in name.split("."):
            value = value[part]
        assert yaml.safe_load(setting.default) == value, name
