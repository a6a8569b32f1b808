"""Whether drafting pays, as measured."""

from __future__ import annotations

from drafters.policy import RARELY, Worth


def test_what_is_not_known_is_tried() -> None:
    assert Worth().pays(0.1)


def test_what_costs_more_than_it_brings_is_tried_rarely() -> None:
    worth = Worth()
    worth.took(0.010)
    worth.emitted(2, 0.008)  # 4 ms each
    assert worth.pays(3.0)
    assert not worth.pays(2.0)
    assert sum(worth.tried(1.0) for _ in range(10 * RARELY)) == 10
