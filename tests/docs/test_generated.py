"""The generated files are up to date."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.generated import API, DEFAULT_YAML, ROOFLINE, SETTINGS, api, default_yaml, roofline, settings

FILES = [(DEFAULT_YAML, lambda _: default_yaml()), (SETTINGS, settings), (API, api), (ROOFLINE, roofline)]


@pytest.mark.parametrize(("file", "generated"), FILES, ids=lambda each: getattr(each, "name", ""))
def test_a_file_is_up_to_date(file: Path, generated: Callable[[str], str]) -> None:
    assert file.read_text() == generated(file.read_text()), "run python -m tests.docs.generated"
