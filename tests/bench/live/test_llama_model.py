"""A converted model gives Outrider's tokens in llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.decode import answer, encode
from bench.model.gguf_file import convert
from bench.plan import PROMPTS, Plan, read_prompts
from outrider import models
from outrider.server.settings import Settings
from outrider.server.worker.runtime import load

if TYPE_CHECKING:
    from bench.live.llama_model import Model

MISSING = "This test needs llama-cpp-python; install it with pip install './bench[peers]'."
TOKENS = 48


def generated(model: Model, prompt: list[int]) -> Iterator[int]:
    """The greedy answer, up to its end token."""
    model.begin()
    for token in islice(model.generate(prompt, temp=0.0, repeat_penalty=1.0), TOKENS):
        yield token
        if token == model.token_eos():
            return


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model_emits_outriders_tokens(tmp_path: Path, exact: Settings) -> None:
    pytest.importorskip("llama_cpp", reason=MISSING)
    from bench.live.llama_model import LlamaPromptLookupDecoding, Model

    drafts = LlamaPromptLookupDecoding()
    file, runtime, drafted_steps, tokens = tmp_path / "model.gguf", load(exact), 0, 0
    convert(Path(models.TARGET), file, "F32")
    with Model.opened(file, 2048, 1, None) as plain, Model.opened(file, 2048, 1, drafts) as drafting:
        for text in read_prompts(PROMPTS, 8):
            prompt = encode(runtime, text)
            expected = answer(runtime, exact, "none", prompt, 0.0, Plan([], [], [], TOKENS, 1)).tokens
            assert list(generated(plain, prompt.tolist())) == list(generated(drafting, prompt.tolist())) == expected
            assert plain.evaluations == len(expected)
            drafted_steps, tokens = drafted_steps + drafting.evaluations, tokens + len(expected)
    assert drafted_steps < tokens
