"""Abilities: each restriction of a template is found, and nothing else."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from outrider.server.chat.template import ChatTemplate, TemplateAbilities
from tests.server.chat.template.restricted import RESTRICTED
from tests.server.fakes import TOKENIZER


@pytest.mark.parametrize("name", RESTRICTED)
def test_restrictions_are_found(name: str) -> None:
    template, lacks = RESTRICTED[name]
    found, usual = asdict(ChatTemplate(TOKENIZER, template).abilities), asdict(TemplateAbilities())
    assert {ability for ability, value in found.items() if value != usual[ability]} == lacks
