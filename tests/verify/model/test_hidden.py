"""Hidden states of a target's forwards: those of committed tokens are kept, at their positions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import Ints
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookupOptions
from outrider.verify.decode import decode
from outrider.verify.model.hidden import StateRing
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.verify.draft_model.test_draft_model import PROMPT


@pytest.mark.parametrize("layers", [(), (0, 1)], ids=str)
def test_the_states_of_committed_tokens_are_kept(tiny_config: LlamaConfig, layers: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    runner = TorchRunner(LlamaForCausalLM(tiny_config), started=False)
    runner.tap_hidden(layers)
    runner.start(128)
    verifier = Verifier(runner, runner.new_cache())
    repeated: Ints = np.tile(PROMPT, 3)
    options = DecodeOptions(SamplingParams(temperature=0), 20, max_nodes=12)
    text = [*repeated.tolist(), *decode(verifier, LookupDrafter(LookupOptions()), repeated, options).tokens]
    hidden = verifier.cache.hidden
    assert hidden is not None and (hidden.first, hidden.end) == (0, len(text) - 1)
    plain = LlamaForCausalLM(LlamaConfig(**tiny_config.to_dict()))
    plain.load_state_dict(runner.model.state_dict())
    with torch.no_grad():
        expected = plain.model(torch.tensor([text[:-1]]), output_hidden_states=True)
    states = [expected.hidden_states[layer] for layer in layers] or [expected.last_hidden_state]
    assert torch.allclose(hidden.read(0, len(text) - 1), torch.cat(states, -1)[0], atol=1e-4)


CAPACITY = 7


def states(start: int, count: int) -> torch.Tensor:
    return torch.arange(start + 1, start + count + 1, dtype=torch.float32)[:, None]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=8))
def test_kept_states_are_those_written_last(steps: list[tuple[int, int, int]]) -> None:
    ring = StateRing(CAPACITY, 1, torch.float32, torch.device("cpu"))
    for start, count, length in steps:
        ring.write(start, states(start, count))
        assert ring.end == start + count and ring.end - ring.first <= CAPACITY
        ring.truncate(length)
        found = ring.read(-1, 45)[:, 0].tolist()
        assert found == [at + 1 if ring.first <= at < ring.end else 0 for at in range(-1, 45)]


def test_a_commit_moves_the_rows_of_the_accepted_path() -> None:
    ring = StateRing(CAPACITY, 1, torch.float32, torch.device("cpu"))
    ring.write(0, states(0, 4))
    ring.write(4, states(4, 5))
    ring.commit(4, [0, 2, 3])
    assert (ring.first, ring.end) == (2, 7)
    assert ring.read(2, 8)[:, 0].tolist() == [3, 4, 5, 7, 8, 0]
    assert ring.take(torch.tensor([6, 4]))[:, 0].tolist() == [8, 5]
