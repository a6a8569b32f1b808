"""Streams that share rounds get the answers that each gets alone, whoever joins, ends or fails beside them."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from outrider import models
from outrider.drafters.interface import Ints, Source, chain
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.verify.constraints.reasoning import ReasoningBudget
from outrider.verify.cost import CostCurve
from outrider.verify.decode import finish
from outrider.verify.generation import DecodeOptions, Drafted, Generation, Step
from outrider.verify.measurement import NODES
from outrider.verify.model import invariance
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.loading import LoadOptions, load_weights
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.segment import Segment
from outrider.verify.pace import MIN_CHUNK_TOKENS, READING_FACTOR, Pace
from outrider.verify.round import OVERLAP_PROBE_INTERVAL, STEPS_SHARE, Member, Overlap, Round, plan_round, run_round
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams
from outrider.verify.verifier import PREFILL_CHUNK_TOKENS, TreeVerifier

DRAFTERS: tuple[DrafterName, ...] = ("none", "lookup", "trigram", "lookahead", "fusion")


class Fixed(CostCurve):
    """A curve that steps do not correct."""

    def observe(self, context: int, streams: int, rows: int, seconds: float) -> None:
        pass


CURVE = Fixed(NODES, (64,), (tuple(1.0 + 0.02 * nodes for nodes in NODES),), 0.02, 0.1)


@pytest.fixture(scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def runner(request: pytest.FixtureRequest) -> ModelRunner:
    """In bfloat16, rows have the same bits in every forward."""
    loaded = load_weights(LoadOptions(str(models.TARGET), dtype=request.param))
    if request.param == "float32":
        loaded.start(700)
    else:
        invariance.start(loaded, 700, "on", None)
        if loaded.row_class is None or not loaded.row_class.has_prompts:
            pytest.skip("this machine's kernels give a prompt other bits beside other rows")
    return loaded


def answers(runner: ModelRunner, make_generation: Callable[[int], Generation], count: int, seed: int) -> dict[int, list[int]]:
    """The answers of requests of which up to eight share rounds, and that start at random rounds."""
    random = Random(seed)
    waiting, active = list(range(count)), dict[int, Generation]()
    found: dict[int, list[int]] = {number: [] for number in waiting}
    while waiting or active:
        while waiting and len(active) < 8 and (not active or random.random() < 0.4):
            number = waiting.pop()
            active[number] = make_generation(number)
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

    def generation(number: int, name: DrafterName) -> Generation:
        options = DecodeOptions(parameters(number), 12 + number, max_nodes=8, curve=CURVE if number % 4 == 1 else None)
        grammar = ReasoningBudget(limit, runner.vocabulary) if number % 4 == 2 else None
        verifier = TreeVerifier(runner, runner.new_cache())
        return Generation(verifier, make(name, Resources(vocabulary=runner.vocabulary + 1)), prompts[number], options, grammar)

    alone = {number: finish(generation(number, "none")).tokens for number in range(count)}
    found = answers(runner, lambda number: generation(number, DRAFTERS[number % len(DRAFTERS)]), count, seed=1)
    assert found == alone


def test_a_prompt_is_read_in_chunks_beside_steps_that_the_time_allows(runner: ModelRunner) -> None:
    def generation(prompt: int, tokens: int = 40) -> Generation:
        options = DecodeOptions(SamplingParams(temperature=0), tokens, curve=CURVE)
        verifier = TreeVerifier(runner, runner.new_cache())
        return Generation(verifier, NoDrafter(), np.ones(prompt, np.int32), options)

    stepping, first, second = generation(1), generation(301), generation(101)
    run_round([stepping])
    sizes = []
    while first.verifier.unread:
        unread = first.verifier.unread
        outcomes = run_round([stepping, first, second])
        assert isinstance(outcomes[0], Step) and outcomes[0].tokens  # the stream goes on
        sizes.append(unread - first.verifier.unread)
    assert sum(sizes) == 300
    # The prompt's rows cost 0.02 each, so as many are read beside the step, 1.0, as the factor leaves time for.
    assert sizes[:-1] == [round((READING_FACTOR - 1.0) / 0.02)] * (len(sizes) - 1)
    before = second.verifier.unread
    run_round([stepping, second], Pace(1.0))
    assert before - second.verifier.unread == MIN_CHUNK_TOKENS
    alone, short = generation(PREFILL_CHUNK_TOKENS + 9), generation(6)
    run_round([alone, short])
    assert (alone.verifier.unread, short.verifier.unread) == (8, 5)
    run_round([alone, short])
    assert (alone.verifier.unread, short.verifier.unread) == (0, 0)


def test_drafts_leave_a_part_of_the_time_to_a_prompt(tiny_runner: ModelRunner) -> None:
    def member(prompt: int) -> Member:
        options = DecodeOptions(SamplingParams(temperature=0), 100, curve=CURVE)
        verifier = TreeVerifier(tiny_runner, tiny_runner.new_cache())
        return Member(Generation(verifier, NoDrafter(), np.ones(prompt, np.int32), options))

    step, reader = member(1), member(30)
    tree = chain(np.ones(60, np.int32), np.full(60, 0.99, np.float32), Source.LOOKUP)
    step.drafted = Drafted(tree, 60, 0.0)

    def nodes_and_tokens(*readers: Member, pace: Pace | None = None) -> tuple[int, int]:
        tokens, seconds = plan_round([step], readers, pace or Pace())
        assert step.plan is not None
        nodes = len(step.plan.tree)
        assert seconds == pytest.approx(1.0 + 0.02 * (nodes + tokens))
        return nodes, tokens

    assert nodes_and_tokens() == (60, 0)
    # Alone, the step takes 2.2; beside a prompt the round takes a multiple of that, and the step at most 0.4 of the round.
    nodes, tokens = nodes_and_tokens(reader)
    assert 1.0 + 0.02 * nodes == pytest.approx(STEPS_SHARE * READING_FACTOR * 2.2, abs=0.03)
    assert 1.0 + 0.02 * (nodes + tokens) == pytest.approx(READING_FACTOR * 2.2, abs=0.03)
    assert nodes_and_tokens(reader, pace=Pace(1.5)) == (0, 25)


def test_an_error_ends_one_request(tiny_runner: ModelRunner) -> None:
    def generations() -> list[Generation]:
        options = DecodeOptions(SamplingParams(temperature=0), 10)
        verifiers = [TreeVerifier(tiny_runner, tiny_runner.new_cache()) for _ in range(3)]
        return [Generation(verifier, NoDrafter(), np.array([5, 6], np.int32), options) for verifier in verifiers]

    expected = finish(generations()[0]).tokens
    for part in ("draft", "plan", "complete", "segment", "judge", "forward", "chunk"):
        running = generations()
        run_round(running)
        if part == "chunk":
            cast(TreeVerifier, running[1].verifier).cache.truncate(0)  # reads its prompt again
        with pytest.MonkeyPatch.context() as patch:
            broken = running[1] if part in ("draft", "plan", "complete") else running[1].verifier
            if part == "forward":
                patch.setattr(running[1].verifier, "segment", lambda tree: Segment(cast(Any, None), cast(Any, None)))
            else:
                patch.setattr(broken, part, raising)
            outcomes = run_round(running)
        failed = [isinstance(outcome, Exception) for outcome in outcomes]
        assert failed == [False, True, False], part
        for outcome, generation in zip(outcomes[::2], running[::2], strict=True):
            assert isinstance(outcome, Step)
            assert outcome.tokens + finish(generation).tokens == expected


def test_rounds_alternate_where_the_host_works_longer_than_the_device() -> None:
    overlap = Overlap()

    def record(host: float, device: float) -> None:
        overlap.record(cast(Round, SimpleNamespace(host_seconds=host, device_seconds=device)))

    assert not overlap.pays()
    record(0.002, 0.003)
    assert not overlap.pays()
    for _ in range(30):
        record(0.009, 0.003)
    assert sum(overlap.pays() for _ in range(OVERLAP_PROBE_INTERVAL)) == OVERLAP_PROBE_INTERVAL - 1


def test_two_rounds_may_run_at_a_time(tiny_runner: ModelRunner) -> None:
    def generation(token: int) -> Generation:
        options = DecodeOptions(SamplingParams(temperature=0), 10)
        return Generation(TreeVerifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), np.array([token], np.int32), options)

    alone = [finish(generation(token)).tokens for token in (5, 6)]
    one, other = generation(5), generation(6)
    rounds = [Round([one], keeps=True), Round([other], keeps=True)]
    firsts = [cast(Step, each.end()[0]) for each in rounds]
    assert [first.tokens + finish(each).tokens for first, each in zip(firsts, (one, other), strict=True)] == alone


def test_a_lost_device_is_raised(tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    options = DecodeOptions(SamplingParams(temperature=0), 10)
    generation = Generation(TreeVerifier(tiny_runner, tiny_runner.new_cache()), NoDrafter(), np.ones(1, np.int32), options)
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(generation, "draft", lambda: raising(error=error))
    with pytest.raises(torch.AcceleratorError):
        run_round([generation])


def raising(*_: Any, error: Exception | None = None, **__: Any) -> Any:
    raise error or ValueError("broken")


@pytest.mark.slow
def test_ten_thousand_rounds_of_joining_and_leaving_keep_the_memory_and_starve_nobody(tiny_runner: ModelRunner) -> None:
    random, caches = Random(3), [tiny_runner.new_cache() for _ in range(8)]
    active: dict[int, tuple[Generation, KVCache]] = {}
    rounds_of = dict[int, int]()  # in which a request took part, and got no token
    memory = []
    for number in range(10_000):
        if caches and random.random() < 0.3:
            prompt = np.array([random.randrange(97) for _ in range(random.randrange(1, 60))], np.int32)
            options = DecodeOptions(SamplingParams(seed=number), random.randrange(1, 30), max_nodes=6)
            verifier = TreeVerifier(tiny_runner, cache := caches.pop())
            active[number] = Generation(verifier, make("lookup", Resources(vocabulary=98)), prompt, options), cache
        outcomes = run_round([generation for generation, _ in active.values()])
        for key, outcome in zip(list(active), outcomes, strict=True):
            assert not isinstance(outcome, Exception)
            rounds_of[key] = 0 if outcome and outcome.tokens else rounds_of.get(key, 0) + 1
            assert rounds_of[key] <= 3  # a prompt has one chunk
            if (outcome and outcome.finish) or random.random() < 0.01:
                generation, cache = active.pop(key)
                generation.close()
                caches.append(cache)
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]))
    assert statistics.median(memory[-1000:]) < 1.02 * statistics.median(memory[2000:3000])


@pytest.mark.parametrize(("prompts", "corrected"), [((1,), "points"), ((1, 1), "streams"), ((1, 60), ""), ((60,), "")])
def test_rounds_of_steps_correct_the_curve(tiny_runner: ModelRunner, prompts: tuple[int, ...], corrected: str) -> None:
    """The step of a stream alone corrects its points, steps in company what a stream costs, and prompts nothing."""
    curve = CostCurve(NODES, (64,), [[1.0 + 0.02 * nodes for nodes in NODES]], 0.02, 0.1)
    before = curve.state()
    options = DecodeOptions(SamplingParams(temperature=0), 40, curve=curve)
    verifiers = [TreeVerifier(tiny_runner, tiny_runner.new_cache()) for _ in prompts]
    run_round(
        [Generation(each, NoDrafter(), np.ones(n, np.int32), options) for each, n in zip(verifiers, prompts, strict=True)]
    )
    assert (curve.state()["seconds"] != before["seconds"]) == (corrected == "points")
    assert (curve.stream_seconds != before["stream_seconds"]) == (corrected == "streams")
    assert curve.is_corrected == bool(corrected)


def test_rounds_are_measured(tiny_runner: ModelRunner) -> None:
    """Those of steps alone, and those that read a prompt beside them, unless another round overlaps them."""

    def generation(prompt: int) -> Generation:
        options = DecodeOptions(SamplingParams(temperature=0), 40, curve=CURVE)
        verifier = TreeVerifier(tiny_runner, tiny_runner.new_cache())
        return Generation(verifier, NoDrafter(), np.ones(prompt, np.int32), options)

    pace, step, reader = Pace(), generation(1), generation(60)
    Round([step], pace, keeps=True).end()
    assert pace.limit(1.0) == READING_FACTOR
    Round([step], pace).end()
    limit = pace.limit(1.0)
    assert limit < READING_FACTOR  # the step took less than the second that the curve says
    Round([step, reader], pace).end()
    assert pace.limit(1.0) > limit


def test_a_slow_prompt_is_read_in_parts_that_end_in_time(tiny_runner: ModelRunner) -> None:
    """The worker reports between rounds, so no round may take longer than it may be silent."""
    pace = Pace(silent_seconds=12.0)
    pace.record_chunk(64, 64.0)
    verifier = TreeVerifier(tiny_runner, tiny_runner.new_cache())
    prompt = np.arange(60, dtype=np.int32)
    generation = Generation(verifier, NoDrafter(), prompt, DecodeOptions(SamplingParams(temperature=0), 2))
    Round([generation], pace).end()
    assert verifier.committed_rows == 12
    while verifier.unread:
        Round([generation], pace).end()
    assert finish(generation).tokens == decode_alone(tiny_runner, prompt)


def decode_alone(runner: ModelRunner, prompt: Ints) -> list[int]:
    options = DecodeOptions(SamplingParams(temperature=0), 2)
    return finish(Generation(TreeVerifier(runner, runner.new_cache()), NoDrafter(), prompt, options)).tokens
