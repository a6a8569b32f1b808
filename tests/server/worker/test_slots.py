"""Slots are taken from the sessions that need them least, and are not lost when rows cannot be copied to them."""

import numpy as np
import pytest

from outrider.drafters.none import NoDrafter
from outrider.server.worker.session import Session
from outrider.server.worker.slots import Slots
from outrider.verify.decode import decode
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier

PROMPT = np.arange(5, dtype=np.int32)


def session_with(runner: TorchRunner, slot: KVCache | None) -> Session:
    """A session that has answered a request in this slot."""
    assert slot is not None
    session = Session(Verifier(runner, slot))
    decode(session.verifier, NoDrafter(), PROMPT, DecodeOptions(SamplingParams(temperature=0), 2, max_nodes=0))
    return session


def test_the_first_session_loses_its_slot_and_gets_another_one(tiny_runner: TorchRunner) -> None:
    sessions: list[Session] = []
    slots = Slots(tiny_runner, 2, lambda: sessions)
    sessions += [session_with(tiny_runner, slots.take()) for _ in range(2)]
    rows = sessions[0].verifier.committed_rows
    assert (slots.count, slots.free) == (2, 0)
    taken = slots.take()
    assert taken is not None and taken.length == 0
    assert [each.verifier.is_swapped_out for each in sessions] == [True, False]
    slots.give_back(taken)
    assert slots.swap_in(sessions[0])
    assert not sessions[0].verifier.is_swapped_out and sessions[0].verifier.committed_rows == rows
    assert slots.free == 0


def test_a_slot_is_free_again_if_rows_cannot_be_copied_to_it(tiny_runner: TorchRunner) -> None:
    slots = Slots(tiny_runner, 1, list)
    session = session_with(tiny_runner, tiny_runner.new_cache())
    slot = slots.take()
    assert slot is not None
    with pytest.raises(MemoryError), slots.returned_on_error(slot, session):
        raise MemoryError
    assert slots.free == 1 and slot.length == 0
