"""A configuration is read as transformers reads it, however old it is; sizes that do not fit each other are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from outrider.verify.checkpoint import DEFAULT_REVISION, read_json
from outrider.verify.model.architecture.config import read_config
from outrider.verify.model.architecture.defaults import DEFAULTS
from outrider.verify.model.architecture.description import Architecture, Latent, Layer, Mixture, Recurrence, Rotary, State
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


ATTENTION = Layer(heads=4, kv_heads=2, head_dim=16, rotary=0)
DELTA = Recurrence(State.DELTA_RULE, 3, heads=4, key_heads=2, key_dim=8, value_dim=8)
MIXTURE = Mixture(12, 3, groups=4, used_groups=2)
ROTARY = Rotary(16, 1e4)
WHOLE = Architecture("x", 64, 97, (ATTENTION, replace(ATTENTION, source=0)), (ROTARY,), 512, 1e-6)


@pytest.mark.parametrize(
    ("fitting", "fields"),
    [
        *((MIXTURE, {"used": used}) for used in (0, 13, 7, -1, 2.0, None, "3", 2**40)),
        *((MIXTURE, {"groups": groups}) for groups in (5, 0, 12, -4)),
        *((MIXTURE, {"used_groups": used}) for used in (5, 0)),
        (MIXTURE, {"experts": 2**31}),
        *((ROTARY, {"size": size}) for size in (0, -2, 2**32 + 16)),
        *((DELTA, {"key_heads": heads}) for heads in (3, 0, 5, -2)),
        (DELTA, {"window": -1}),
        (Latent(8, 8, 8), {"rank": 0}),
        *((ATTENTION, {"kv_heads": heads}) for heads in (3, 0, 8, None)),
        *((ATTENTION, {"window": window}) for window in (0, -1, 2**31, 1.5)),
        (ATTENTION, {"heads": -4}),
        *((WHOLE, {"layers": layers}) for layers in ((), (replace(ATTENTION, rotary=None, source=0),))),
        (WHOLE, {"layers": (ATTENTION, replace(ATTENTION, source=2))}),
        (WHOLE, {"layers": (ATTENTION, replace(ATTENTION, head_dim=32, source=0))}),
        (WHOLE, {"layers": (replace(ATTENTION, head_dim=8),)}),
        (WHOLE, {"vocabulary": 0}),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fitting: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its sizes do not fit each other"):
        replace(fitting, **fields)


def test_a_table_of_angles_that_is_not_there_is_refused() -> None:
    with pytest.raises(IndexError):
        replace(WHOLE, rotaries=())
