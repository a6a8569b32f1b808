"""Programs that hold random weights of a known shape: Outrider and llama.cpp, in process.

Both emit recorded answers, so what they draft is accepted as often as with the model that wrote them.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from bench.figures import OUTRIDER
from bench.model.forced import context_of, forced_answer
from bench.model.steps import make_runner, node_budget
from bench.recordings import Line
from bench.turns import Answer, Peer
from outrider.drafters.registry import Resources
from outrider.server.settings import Settings
from outrider.verify.measurement import CONTEXTS, timed_forward

CONTEXT = CONTEXTS[0]  # tokens of the text before a step
LLAMA = "llama.cpp"
LLAMA_PACKAGES = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
PLAIN, LOOKUP = "plain", "lookup"


@dataclass(frozen=True)
class RandomWeights:
    """Random weights of a shape in one number of bits."""

    shape: str
    settings: Settings
    gguf: Path | None  # None if llama.cpp does not take part
    resources: Resources  # of Outrider's drafters
    drafters: Sequence[str]


class ShapePeer(Peer[Line]):
    """A program that holds random weights, reads the prompt of a line, and emits its answer."""

    @abstractmethod
    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        """Loads the weights; closing the stack frees them."""

    @abstractmethod
    def step_seconds(self, rows: int) -> float:
        """Seconds of a forward over some tokens after CONTEXT others, with the likeliest token at each."""


class OutriderShape(ShapePeer):
    """Outrider's runner, with each of the chosen drafters."""

    name = OUTRIDER

    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        self.methods = weights.drafters
        self._resources = weights.resources
        self._runner = make_runner(weights.shape, weights.settings)
        self._budget = node_budget(self._runner, weights.settings)
        self._cache = self._runner.new_cache()
        self._cache.fill(CONTEXT)

    def step_seconds(self, rows: int) -> float:
        return timed_forward(self._runner, self._cache, rows - 1)

    def answer(self, method: str, item: Line) -> Answer:
        started = time.perf_counter()
        decoded = forced_answer(self._runner, method, self._resources, item, *self._budget)
        return Answer(len(decoded.tokens), time.perf_counter() - started, decoded.tokens, len(decoded.steps))


class LlamaShape(ShapePeer):
    """llama.cpp's own loops through llama-cpp-python, plain and with its n-gram drafts, over tokens that the record chooses."""

    name, methods, packages = LLAMA, (PLAIN, LOOKUP), LLAMA_PACKAGES

    def __init__(self, weights: RandomWeights, stack: ExitStack) -> None:
        from bench.peers.llama_model import LlamaPromptLookupDecoding, Model

        assert weights.gguf is not None
        sizes = (weights.gguf, context_of(weights.shape, weights.settings), weights.settings.model.threads or 1)
        drafts = {PLAIN: None, LOOKUP: LlamaPromptLookupDecoding()}
        self._models = {each: stack.enter_context(Model.opened(*sizes, drafts[each])) for each in self.methods}

    def step_seconds(self, rows: int) -> float:
        model = self._models[LOOKUP]  # computes logits at every row
        if model.n_tokens != CONTEXT:
            model.begin()
            model.eval([0] * CONTEXT)
        started = time.perf_counter()
        model.eval([0] * rows)
        model.scores[CONTEXT : CONTEXT + rows].argmax(-1)
        seconds = time.perf_counter() - started
        model.n_tokens = CONTEXT
        return seconds

    def answer(self, method: str, item: Line) -> Answer:
        model = self._models[method]
        model.begin(item.answer.tolist(), start=len(item.prompt))
        started = time.perf_counter()
        tokens = list(islice(model.generate(item.prompt.tolist(), temp=0.0, repeat_penalty=1.0), len(item.answer)))
        seconds = time.perf_counter() - started
        assert tokens == item.answer.tolist()
        return Answer(len(tokens), seconds, tokens, model.evaluations)


PEERS: Mapping[str, type[ShapePeer]] = {OUTRIDER: OutriderShape, LLAMA: LlamaShape}
