"""Hidden states of a target's forwards: the same by every backend, and at the positions of the committed tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import Ints
from outrider.drafters.lookup import LookupDrafter
from outrider.drafters.options import LookupOptions
from outrider.verify.decode import decode
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
