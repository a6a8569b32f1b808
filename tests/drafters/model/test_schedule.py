"""When a draft model drafts: chosen by the measured costs and gains."""

import copy

from outrider.drafters.model.schedule import PROBE_SHARE, PROBE_STEPS, ModelWork, Schedule, Schedules
from outrider.drafters.policy import PROBE_INTERVAL

# Steps after which no mean depends on its first value.
MEASURED = 400


def measured(before: float, both: float, gain: float, tokens: int = 2) -> Schedule:
    """A step takes 10 ms and emits `tokens`; drafting before it takes `before` seconds, and a step with drafting `both`."""
    schedule = Schedule()
    for _ in range(MEASURED):
        schedule.record_tokens(tokens, 0.010)
        schedule.record_before(round(gain), before)
        schedule.record_during(gain)
        schedule.record_step(False, 0.010)
        schedule.record_step(True, both)
    return schedule


def choices(schedule: Schedule, steps: int, has_chain: bool = False) -> list[ModelWork]:
    return [schedule.choose(has_chain) for _ in range(steps)]


def test_the_model_drafts_beside_a_verification_that_it_hardly_slows_down() -> None:
    found = choices(measured(before=0.004, both=0.011, gain=1.0), 4 * PROBE_INTERVAL, has_chain=True)
    assert sum(choice.during for choice in found) == len(found) - 2  # the others measure steps without it
    assert not any(choice.before for choice in found)


def test_the_model_drafts_before_a_verification_that_it_slows_down() -> None:
    found = choices(measured(before=0.004, both=0.016, gain=1.0), 100)
    assert found == [ModelWork(before=True)] * 100


def test_probes_of_a_model_that_does_not_pay_take_a_hundredth_of_the_time() -> None:
    schedule = measured(before=0.010, both=0.020, gain=1.0)
    assert schedule.was_worth_lately
    seconds, probes = 0.0, 0
    for _ in range(10_000):
        choice = schedule.choose(False)
        taken = 0.010 + 0.015 * choice.is_probe
        schedule.record_probe(choice, taken)
        seconds, probes = seconds + taken, probes + choice.is_probe
        assert choice == (ModelWork(True, True, True) if choice.is_probe else ModelWork())
    assert not schedule.was_worth_lately
    assert 0.5 * PROBE_SHARE * seconds < 0.015 * probes <= PROBE_SHARE * seconds
    assert probes % PROBE_STEPS == 0


def test_sessions_share_schedules_and_greedy_requests_have_their_own() -> None:
    schedules = Schedules()
    assert copy.deepcopy(schedules) is schedules
    assert copy.deepcopy(schedules.of(True)) is schedules.of(True)
    assert schedules.of(True) is not schedules.of(False)
