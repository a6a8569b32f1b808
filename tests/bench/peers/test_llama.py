"""A converted model gives Outrider's tokens in llama.cpp, in process and over HTTP."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from bench.peers.answers import Choice, make_weights
from bench.peers.levels import Levels
from bench.peers.llama import LlamaInProcess, LlamaServer
from bench.peers.outrider import OutriderInProcess
from bench.peers.peer import Answer, Question, install_command
from bench.plan import PROMPTS, Plan, read_prompts
from outrider.verify.tokenizer import load_tokenizer

MISSING = "This test needs llama-cpp-python; install it with pip install './bench[peers]'."
TOKENS = 48


def question(path: str, prompt: str) -> Question:
    return Question(prompt, np.array(load_tokenizer(path).encode(prompt), np.int32), 0.0, TOKENS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_converted_model_emits_outriders_tokens(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason=MISSING)
    choice = Choice(Plan(["none"], [], [0.0], TOKENS, 1), [32], [])
    weights = make_weights(choice, Levels(None, ["--speculation.max_nodes", "8"], 1), 32, tmp_path)
    with ExitStack() as stack:
        ours, theirs = OutriderInProcess(weights, stack), LlamaInProcess(weights, stack)
        drafted = list[Answer]()
        for prompt in read_prompts(PROMPTS, 8):
            asked = question(weights.path, prompt)
            expected = ours.answer("none", asked)
            plain, lookup = theirs.answer("plain", asked), theirs.answer("lookup", asked)
            assert plain.ids == lookup.ids == expected.ids
            assert plain.steps == expected.steps == expected.tokens
            drafted.append(lookup)
    assert sum(answer.steps or 0 for answer in drafted) < sum(answer.tokens for answer in drafted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_server_counts_the_tokens_of_the_same_answer(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason=MISSING)
    if command := install_command(LlamaServer.packages):
        pytest.skip(f"This test needs llama-cpp-python's server; install it with {command}.")
    choice = Choice(Plan(["none"], [], [0.0], TOKENS, 1), [16], [])
    weights = make_weights(choice, Levels(None, [], 1), 16, tmp_path)
    asked = question(weights.path, read_prompts(PROMPTS, 1)[0])
    with ExitStack() as stack:
        expected = LlamaInProcess(weights, stack).answer("plain", asked).tokens
        server = LlamaServer(weights, stack)
        assert [server.answer(method, asked).tokens for method in server.methods] == [expected, expected]
