"""The format is chosen by the chat template's text."""

from __future__ import annotations

import re
from typing import get_args

import pytest

from outrider.server.chat.tools import FORMATS, detect_format
from outrider.server.settings import Model
from tests.docs.markdown import ROOT
from tests.server.chat.tools.samples import SAMPLES, Sample


@pytest.mark.parametrize("sample", SAMPLES, ids=[sample.format for sample in SAMPLES])
def test_the_format_is_detected_from_the_template(sample: Sample) -> None:
    assert detect_format(f"{{% if tools %}} {sample.template}") == FORMATS[sample.format]


def test_every_format_has_a_sample_and_can_be_set() -> None:
    assert {sample.format for sample in SAMPLES} == set(FORMATS)
    assert {"auto", *FORMATS} == set(get_args(Model.model_fields["tool_format"].annotation))
    assert all(other in FORMATS for format in FORMATS.values() for other in format.also)


def test_the_documentation_has_every_format() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", (ROOT / "docs" / "tools.md").read_text(), flags=re.M)
    assert dict(rows) == {format.name: format.models for format in FORMATS.values()}
