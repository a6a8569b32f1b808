"""Streams that share rounds get the answers that each gets alone, whoever joins, ends or fails beside them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider import models
from outrider.drafters.interface import Ints
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.verify.constraints.reasoning import ReasoningBudget
from outrider.verify.controller import MIN_CHUNK_TOKENS, Controller, Plan, Times
from outrider.verify.decode import finish
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import Segment
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.round import OLDEST_SHARE, Round, run_round
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams
from outrider.verify.stream import DecodeOptions, Step, Stream
from outrider.verify.verifier import Verifier
from tests.verify.test_controller import CURVE

DRAFTERS: tuple[DrafterName, ...] = ("none", "lookup", "trigram", "lookahead", "fusion")


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    loaded = load_weights(LoadOptions(str(models.TARGET), dtype=request.param))
    loaded.start(700)
    return loaded


def answers(runner: ModelRunner, make_stream: Callable[[int], Stream], count: int, seed: int) -> dict[int, list[int]]:
    """The answers of requests of which up to eight share rounds, and that start at random rounds."""
    random = Random(seed)
    waiting, active = list(range(count)), dict[int, Stream]()
    found: dict[int, list[int]] = {number: [] for number in waiting}
    while waiting or active:
        while waiting and len(active) < 8 and (not active or random.random() < 0.4):
            number = waiting.pop()
            active[number] = make_stream(number)
        for number, outcome in zip(list(active), run_round(list(active.values())), strict=True):
            assert not isinstance(outcome, Exception), outcome
            found[number] += outcome.tokens if outcome else []
            if outcome and outcome.finish:
                active.pop(number).close()
    return found


def parameters(number: int) -> SamplingParams:
    """Greedy and sampled, with and without penalties and log-probabilities."""
    params = SamplingParams(temperature=0.8 * (number % 2), seed=number, logprobs=2 if number % 5 == 0 else None)
    return replace(params, top_p=0.9, top_k=50, repetition_penalty=1.1) if number % 3 == 0 else params


def test_streams_that_come_and_go_get_the_answers_of_each_alone(runner: ModelRunner) -> None:
    random, count = np.random.default_rng(5), 10
    prompts = [random.integers(5, 3000, random.integers(1, 150)).astype(np.int32) for _ in range(count)]
    limit = ReasoningLimit(5, closing=17)

    def stream(number: int, name: DrafterName) -> Stream:
        options = DecodeOptions(parameters(number), 12 + number, max_nodes=8, curve=CURVE if number % 4 == 1 else None)
        grammar = ReasoningBudget(limit, runner.vocabulary) if number % 4 == 2 else None
        verifier = Verifier(runner, runner.new_cache())
        return Stream(verifier, make(name, Resources(vocabulary=runner.vocabulary + 1)), prompts[number], options, grammar)

    alone = {number: finish(stream(number, "none")).tokens for number in range(count)}
    found = answers(runner, lambda number: stream(number, DRAFTERS[number % len(DRAFTERS)]), count, seed=1)
    assert found == alone


def hurried() -> Controller:
    """A controller whose rounds took far longer than predicted, so that they read the smallest chunks."""
    controller = Controller()
    for _ in range(100):
        controller.record(Plan([], 0, 1.0, CURVE, reads=True), 1, Times(0.0, 10.0, None))
    return controller


def greedy(runner: ModelRunner, prompt: Sequence[int] | Ints, tokens: int = 10) -> Stream:
    options = DecodeOptions(SamplingParams(temperature=0), tokens, curve=CURVE)
    return Stream(Verifier(runner, runner.new_cache()), NoDrafter(), np.array(prompt, np.int32), options)


def test_a_storm_of_short_prompts_neither_waits_for_a_long_one_nor_stops_it(tiny_runner: ModelRunner) -> None:
    """Every short prompt is read in the round in which it comes; the long one gets its share; all answers are right."""
    text = np.arange(101, dtype=np.int32) % 90
    long, rounds, found, short = greedy(tiny_runner, text, 2), 0, list[int](), greedy(tiny_runner, text[:1], 2)
    while long.verifier.unread_prompt > MIN_CHUNK_TOKENS:
        unread, before = long.verifier.unread_prompt, short
        short = greedy(tiny_runner, text[rounds : rounds + 7], 2)
        outcomes = run_round([long, before, short], hurried())
        assert unread - long.verifier.unread_prompt == MIN_CHUNK_TOKENS // OLDEST_SHARE
        assert short.verifier.unread_prompt == 0
        assert isinstance(outcomes[1], Step) and outcomes[1].tokens  # the round after its prompt's
        rounds += 1
    while long.remaining:
        outcome = run_round([long])[0]
        assert isinstance(outcome, Step)
        found += outcome.tokens
    assert rounds == (100 - MIN_CHUNK_TOKENS) * OLDEST_SHARE // MIN_CHUNK_TOKENS
    assert found == finish(greedy(tiny_runner, text, 2)).tokens


def test_an_error_ends_one_request(tiny_runner: ModelRunner) -> None:
    expected = finish(greedy(tiny_runner, [5, 6])).tokens
    for part in ("draft", "rows", "accept", "segment", "judge", "forward", "chunk"):
        running = [greedy(tiny_runner, [5, 6]) for _ in range(3)]
        run_round(running)
        if part == "chunk":
            running[1].verifier.cache.truncate(0)  # reads its prompt again
        with pytest.MonkeyPatch.context() as patch:
            broken = running[1] if part in ("draft", "rows", "accept") else running[1].verifier
            if part == "forward":
                patch.setattr(running[1].verifier, "segment", lambda tree: Segment(cast(Any, None), cast(Any, None)))
            else:
                patch.setattr(broken, part, raising)
            outcomes = run_round(running)
        failed = [isinstance(outcome, Exception) for outcome in outcomes]
        assert failed == [False, True, False], part
        for outcome, stream in zip(outcomes[::2], running[::2], strict=True):
            assert isinstance(outcome, Step)
            assert outcome.tokens + finish(stream).tokens == expected


def test_two_rounds_may_run_at_a_time(tiny_runner: ModelRunner) -> None:
    alone = [finish(greedy(tiny_runner, [token])).tokens for token in (5, 6)]
    one, other = (greedy(tiny_runner, [token]) for token in (5, 6))
    rounds = [Round([one], clone_logits=True), Round([other], clone_logits=True)]
    for each in rounds:
        each.launch()
    firsts = [cast(Step, each.finish()[0]) for each in rounds]
    assert [first.tokens + finish(stream).tokens for first, stream in zip(firsts, (one, other), strict=True)] == alone


def test_a_lost_device_is_raised(tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = greedy(tiny_runner, [1])
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(stream, "draft", lambda: raising(error=error))
    with pytest.raises(torch.AcceleratorError):
        run_round([stream])


def raising(*_: Any, error: Exception | None = None, **__: Any) -> Any:
    raise error or ValueError("broken")


@pytest.mark.slow
def test_ten_thousand_rounds_of_joining_and_leaving_keep_the_memory_and_starve_nobody(tiny_runner: ModelRunner) -> None:
    random, caches = Random(3), [tiny_runner.new_cache() for _ in range(8)]
    active: dict[int, tuple[Stream, KVCache]] = {}
    rounds_of = dict[int, int]()  # in which a request took part, and got no token
    memory = []
    for number in range(10_000):
        if caches and random.random() < 0.3:
            prompt = np.array([random.randrange(97) for _ in range(random.randrange(1, 60))], np.int32)
            options = DecodeOptions(SamplingParams(seed=number), random.randrange(1, 30), max_nodes=6)
            verifier = Verifier(tiny_runner, cache := caches.pop())
            active[number] = Stream(verifier, make("lookup", Resources(vocabulary=98)), prompt, options), cache
        outcomes = run_round([stream for stream, _ in active.values()])
        for key, outcome in zip(list(active), outcomes, strict=True):
            assert not isinstance(outcome, Exception)
            rounds_of[key] = 0 if outcome and outcome.tokens else rounds_of.get(key, 0) + 1
            assert rounds_of[key] <= 3  # a prompt has one chunk
            if (outcome and outcome.finish) or random.random() < 0.01:
                stream, cache = active.pop(key)
                stream.close()
                caches.append(cache)
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert statistics.median(memory[-1000:]) < 1.02 * statistics.median(memory[2000:3000])
