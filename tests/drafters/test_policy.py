"""Measured costs, gains and acceptance, and the decisions based on them."""

import pytest

from outrider.drafters.policy import Calibration, Share, Trust


def test_a_share_moves_from_the_assumption_to_the_latest_cases() -> None:
    share = Share(0.7, cases=6, most=20)
    assert share.mean == 0.7
    share.record(False)
    assert share.mean == pytest.approx(0.6)
    for _ in range(200):
        share.record(False)
    assert share.mean < 0.01
    share.record(True)
    assert share.mean > 0.05


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
    assert calibration.acceptance(0, 0.85) == pytest.approx(0.85)
