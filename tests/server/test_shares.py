"""Shares of a bounded resource."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from outrider.server.shares import Ledger, NoRoom

BOUND = 20


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, BOUND)), max_size=40))
def test_who_holds_nothing_is_admitted_and_nobody_takes_more_than_a_share_above_the_bound(taken: list[tuple[str, int]]) -> None:
    ledger, held = Ledger(BOUND), Counter[str]()
    for principal, amount in taken:
        total = sum(held.values())
        fits = total + amount <= BOUND
        is_share = held[principal] + amount <= BOUND // max(1, sum(each > 0 for each in held.values()))
        try:
            ledger.take(principal, amount)
        except NoRoom:
            assert held[principal] and not fits and not is_share
        else:
            assert fits or not held[principal] or is_share
            held[principal] += amount
    for principal, amount in held.items():
        ledger.release(principal, amount)
    ledger.take("d", 1)
    ledger.take("d", BOUND - 1)  # everything was given back
