"""Forced replay: real forwards of random weights that emit a recorded answer.

The costs are those of this machine, the acceptance is that of the model that wrote the answer. Logits of random weights are
meaningless, so drafters get no feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.model.shapes import SHAPES, check_shape
from bench.plan import BenchError
from bench.recordings import Line, Recordings, load_encoder, load_resources, load_stream
from outrider.drafters.interface import DraftTree, Ints
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make, warm
from outrider.server.settings import Settings
from outrider.verify.cost import CostCurve
from outrider.verify.decode import Decoded, finish
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.model.transfer import Download
from outrider.verify.sampling.acceptance import Decision, NodeLogits, walk
from outrider.verify.sampling.rows import is_on_host
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier


class Recorded:
    """Chooses the tokens of a recorded answer. Implements `outrider.verify.sampling.acceptance.Rule`."""

    def __init__(self, answer: Ints) -> None:
        self._answer = answer.tolist()

    def decide(self, logits: NodeLogits, tree: DraftTree, first: int, extra: Sequence[Any] = ()) -> Callable[[], Decision]:
        depths = [0, *tree.depths.tolist()]
        on_record = [True]
        for parent, depth, token in zip(tree.parents.tolist(), depths[1:], tree.tokens.tolist(), strict=True):
            on_record.append(on_record[parent + 1] and self._next(first + depth - 1) == token)
        chosen = [self._next(first + depth) if right else -1 for right, depth in zip(on_record, depths, strict=True)]
        if is_on_host(logits):
            return lambda: (*walk(tree, lambda row: _after_greedy_choice(logits[row], chosen[row])), [*extra])
        download = Download(logits[:].argmax(-1).int(), *extra)  # as costly as a greedy choice
        return lambda: (*walk(tree, chosen.__getitem__), download.arrays()[1:])

    def _next(self, position: int) -> int:
        return self._answer[position] if position < len(self._answer) else 0


def _after_greedy_choice(logits: NDArray[np.float32], token: int) -> int:
    """The recorded token, after the work of a greedy choice."""
    logits.argmax(-1)
    return token


def forced_verifier(runner: TorchRunner, answer: Ints) -> Verifier:
    """A verifier that emits a recorded answer, at the cost of greedy decoding."""
    return Verifier(runner, runner.new_cache(), lambda _: Recorded(answer))


def context_of(shape: str, settings: Settings) -> int:
    """The context in tokens of random weights of this shape. Raises BenchError for an unknown one."""
    check_shape(shape)
    return settings.model.context_tokens or int(SHAPES[shape]().max_position_embeddings)


def load_replay(recordings: Recordings, options: Options, context: int) -> tuple[list[Line], Resources]:
    """The lines of the first stream that fit the context, and what drafters know of the corpus. Raises BenchError."""
    encoder = load_encoder(recordings.tokenizer)
    lines, _ = load_stream(recordings.streams[0], encoder, recordings.limit)
    fitting = select_fitting(lines, context)
    resources = load_resources(recordings.corpus, encoder, options)
    warm(resources)
    return fitting, resources


def select_fitting(lines: Sequence[Line], context: int) -> list[Line]:
    """The lines whose answers take less than half of the context, with the ends of their prompts. Raises BenchError."""
    fitting = [line for line in lines if 1 < len(line.answer) < context // 2]
    if not fitting:
        raise BenchError("No recorded answer fits the context; increase --model.context_tokens.")
    return [replace(line, prompt=line.prompt[-(context - len(line.answer) - 1) :]) for line in fitting]


def forced_stream(
    runner: TorchRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Stream:
    """A stream that reads the prompt of a recorded line and emits its answer."""
    drafter = make(name, resources)
    drafter.feedback = 0
    options = DecodeOptions(SamplingParams(temperature=0), len(line.answer), max_nodes=max_nodes, curve=curve)
    return Stream(forced_verifier(runner, line.answer), drafter, line.prompt, options)


def forced_answer(
    runner: TorchRunner, name: DrafterName, resources: Resources, line: Line, max_nodes: int, curve: CostCurve | None
) -> Decoded:
    """The answer of this stream."""
    decoded = finish(forced_stream(runner, name, resources, line, max_nodes, curve))
    assert np.array_equal(decoded.tokens, line.answer)
    return decoded
