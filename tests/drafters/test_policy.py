"""Measured costs, gains and acceptance, and the decisions based on them."""

import pytest

from outrider.drafters.policy import PROBE_INTERVAL, Calibration, CostBenefit, Trust


def test_an_action_that_costs_more_than_it_saves_is_only_probed() -> None:
    benefit = CostBenefit()
    benefit.record_action(0.010)
    benefit.record_step(2, 0.008)  # 4 ms per token
    assert benefit.is_worth(3.0)
    assert not benefit.is_worth(2.0)
    assert sum(benefit.is_worth_or_probe(1.0) for _ in range(10 * PROBE_INTERVAL)) == 10


def test_the_time_per_token_is_that_of_all_steps() -> None:
    """Not the mean of the steps' own ratios, which steps of one token dominate; and a delayed step counts little."""
    benefit = CostBenefit()
    for _ in range(200):
        benefit.record_step(1, 0.010)
        benefit.record_step(19, 0.010)
    assert benefit.token_seconds == pytest.approx(0.001, rel=0.15)
    before = benefit.token_seconds
    benefit.record_step(10, 10.0)
    assert before is not None and benefit.token_seconds is not None and benefit.token_seconds < 1.3 * before


def test_trust_follows_accepted_over_expected_tokens() -> None:
    trust = Trust()
    assert trust.factor == 1.0
    for _ in range(100):
        trust.record(4.0, 1)
    assert trust.factor == pytest.approx(0.25, abs=0.01)
    for _ in range(100):
        trust.record(1.0, 3)
    assert trust.factor == 1.0


def test_calibration_moves_from_the_models_probability_to_the_measured_one() -> None:
    calibration = Calibration(2)
    assert calibration.acceptance(0, 0.55) == pytest.approx(0.55)
    for _ in range(50):
        calibration.record([0, 1], [0.55, 0.2], 0)
    assert calibration.acceptance(0, 0.55) > 0.9
    assert calibration.acceptance(1, 0.2) < 0.1
    assert calibration.acceptance(0, 0.95) == pytest.approx(0.95)
