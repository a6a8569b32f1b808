"""`auto` is `keyed` where an answer could be compared with another, and elsewhere the rule that was measured to be faster."""

from __future__ import annotations

from typing import Any

import pytest

from outrider import models
from outrider.server.engine.messages import Request, StepReport, TokenEvent
from outrider.server.engine.rules import TRIAL_TOKENS, AcceptanceRules, Rule
from outrider.server.settings import load_settings
from outrider.verify.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=0.8)


def rules(**flags: str) -> AcceptanceRules:
    pair = {"draft_model.path": str(models.DRAFT), "speculation.rule": "auto"}
    return AcceptanceRules(load_settings(None, pair | flags))


def record(rules: AcceptanceRules, rule: Rule, tokens: int, seconds: float, **fields: Any) -> None:
    request = Request("r", [1], SamplingParams(temperature=0.8, rule=rule), 8, **fields)
    step = StepReport(seconds / 2, seconds / 4, seconds / 4, {}, {})
    rules.record(request, TokenEvent("r", [7] * tokens, "", step=step))


def measured(keyed: float, rejection: float) -> AcceptanceRules:
    """Rules of which the default drafter has these tokens per second."""
    chooser = rules()
    record(chooser, "keyed", TRIAL_TOKENS, TRIAL_TOKENS / keyed)
    record(chooser, "rejection", TRIAL_TOKENS + 1, (TRIAL_TOKENS + 1) / rejection)
    return chooser


def test_the_faster_rule_is_used_and_the_other_is_measured_now_and_then() -> None:
    for speeds, faster in (((100.0, 200.0), "rejection"), ((200.0, 100.0), "keyed")):
        chooser = measured(*speeds)
        chosen = [chooser.choose(None, None, SAMPLED, False) for _ in range(32)]
        assert chosen.count(faster) == 30  # type: ignore[arg-type]


def test_both_rules_are_tried_before_they_are_compared() -> None:
    chooser = rules()
    assert chooser.choose(None, None, SAMPLED, False) == "keyed"
    record(chooser, "keyed", TRIAL_TOKENS, 1e-3)
    assert chooser.choose(None, None, SAMPLED, False) == "rejection"


def test_drafters_are_measured_separately() -> None:
    chooser = measured(100.0, 200.0)
    assert chooser.choose(None, "pearl", SAMPLED, False) == "keyed"


@pytest.mark.parametrize(
    ("asked", "drafter", "params", "comparable", "rule"),
    [
        ("keyed", None, SAMPLED, False, "keyed"),
        ("rejection", None, SAMPLED, True, "rejection"),
        ("auto", None, SAMPLED, True, "keyed"),
        ("auto", None, SamplingParams(temperature=0), False, "keyed"),
        ("auto", "trigram", SAMPLED, False, "keyed"),
        (None, "fusion", SAMPLED, False, "rejection"),
    ],
)
def test_answers_that_can_be_compared_are_keyed(asked: Any, drafter: Any, params: Any, comparable: bool, rule: Rule) -> None:
    assert measured(100.0, 200.0).choose(asked, drafter, params, comparable) == rule


def test_constrained_and_greedy_answers_are_not_measured() -> None:
    chooser = rules()
    record(chooser, "keyed", TRIAL_TOKENS, 1e-3, grammar="start: /a/")
    record(chooser, "keyed", TRIAL_TOKENS, 1e-3, drafter="trigram")
    assert chooser.choose(None, None, SAMPLED, False) == "keyed"


def test_without_a_draft_model_auto_is_keyed() -> None:
    chooser = AcceptanceRules(load_settings(None, {"speculation.rule": "auto"}))
    record(chooser, "keyed", TRIAL_TOKENS, 1e3)
    assert chooser.choose("auto", "fusion", SAMPLED, False) == "keyed"
