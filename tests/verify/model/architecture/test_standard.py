"""A configuration is read as transformers reads it, whatever its file lacks and however old it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from outrider.verify.checkpoint import DEFAULT_REVISION, read_json
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.defaults import DEFAULTS
from outrider.verify.model.architecture.description import Architecture
from outrider.verify.model.architecture.families import FAMILIES as KNOWN
from outrider.verify.model.architecture.standard import text_config
from tests.verify.model.cpu.native.models import FAMILIES, SIZES

# Configurations of well-known models, as versions of transformers of their time wrote them.
PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text())


def both(content: Any, folder: Path) -> tuple[Architecture | None, Architecture | None]:
    """What is read of a config.json with this content, and of what transformers makes of it."""
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    theirs = AutoConfig.from_pretrained(folder).get_text_config()
    return read_config(text_config(read_json(str(folder), file.name, DEFAULT_REVISION))), read_config(theirs.to_dict())


@pytest.mark.parametrize("fields", [{}, SIZES], ids=["of the class", "small"])
@pytest.mark.parametrize("family", KNOWN)
def test_a_file_may_lack_what_is_the_default_of_its_class(family: str, fields: Any, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family](**{**fields, **(FAMILIES[family] if fields else {})})
    config.save_pretrained(tmp_path)
    whole, default = json.loads((tmp_path / "config.json").read_text()), CONFIG_MAPPING[family]().to_dict()
    short = {name: value for name, value in whole.items() if name == "model_type" or default.get(name, ...) != value}
    assert len(short) < len(whole)
    for content in (whole, short):
        ours, theirs = both(content, tmp_path)
        assert ours == theirs
        assert ours is not None


@pytest.mark.parametrize("name", PUBLISHED)
def test_files_of_any_age_are_read(name: str, tmp_path: Path) -> None:
    ours, theirs = both(PUBLISHED[name], tmp_path)
    assert ours is not None and ours == theirs


def test_every_family_has_its_defaults() -> None:
    assert DEFAULTS.keys() == KNOWN.keys()


@pytest.mark.parametrize("value", ["4096", 0, -1, True, 64.0, [], {}])
def test_a_size_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"hidden_size is .*, which is no whole number above zero"):
        read_config({"model_type": "llama", "hidden_size": value})


def test_other_models_are_not_read() -> None:
    assert read_config({"model_type": "gpt2"}) is None
    assert read_config({}) is None
