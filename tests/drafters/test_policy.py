"""Measured costs, gains and acceptance, and the decisions based on them."""

from __future__ import annotations

import pytest

from drafters.policy import PROBE_INTERVAL, Calibration, CostBenefit, Gains, Probe, Trust, ema


def test_a_mean_starts_with_its_first_value_and_then_decays() -> None:
    assert ema(0.0, 5.0) == 5.0
    assert ema(5.0, 0.0) == pytest.approx(4.5)
    assert ema(ema(5.0, 1.0), 1.0) == pytest.approx(1 + 4 * 0.81)


def test_a_probe_is_due_once_per_interval() -> None:
    probe = Probe(4)
    assert [probe.due() for _ in range(8)] == [False, False, False, True] * 2


def test_unmeasured_actions_pay() -> None:
    assert CostBenefit().pays(0.1)


def test_an_action_that_costs_more_than_it_saves_is_only_probed() -> None:
    benefit = CostBenefit()
    benefit.record_action(0.010)
    benefit.record_step(2, 0.008)  # 4 ms per token
    assert benefit.pays(3.0)
    assert not benefit.pays(2.0)
    assert sum(benefit.pays_or_probes(1.0) for _ in range(10 * PROBE_INTERVAL)) == 10


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


def test_gains_are_tracked_by_the_tokens_expected_from_other_sources() -> None:
    gains = Gains()
    before = gains.expected(3.0)
    for _ in range(50):
        gains.record(0.1, 4)
    assert gains.expected(0.2) == pytest.approx(4.0, abs=0.1)
    assert gains.expected(3.0) == before
