"""Measures a model's steps on this machine: the cost curve that the budget starts with.

Other work on the machine disturbs measurements and only adds time. So all points are timed in several rounds, the smallest time
of each counts, and a point whose smallest times disagree is timed again.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import MAX_NODES, Source, chain
from outrider.verify.cost import NO_ROWS, CostCurve, ExpertCost, parse
from outrider.verify.findings import digest, save_finding
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling.rows import in_place
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.verifier import Verifier

log = logging.getLogger("outrider.worker")

# With the root, these are powers of two: beyond one, matrix products need another tile.
NODES = (0, 1, 3, 7, 15, 31, 63, MAX_NODES)
# The cost of further rows is measured with several streams that have this many nodes each.
STREAM_NODES = 63
CONTEXTS = (64, 512, 2048, 8192, 32768)
FEEDBACK = 8
# Every point is timed ROUNDS times, and at most MOST_ROUNDS times while its times disagree.
ROUNDS, MOST_ROUNDS = 3, 12
# A point is not repeated once its times add up to this. Steps that take so long hardly ever pay, and the first start waits.
POINT_SECONDS = 0.12
# Where the largest step of one stream takes this many times as long as the smallest, rows cost their arithmetic, and those of
# several streams as much as those of one.
DEAR_ROWS = 8.0
# Times agree if the second smallest is at most this multiple of the smallest.
AGREEMENT = 1.1
STREAMS = 4
# The nodes of the steps that an estimate times: a step of two rows costs far less than a line through larger ones says.
ESTIMATED = NODES[:4]
# A point of an estimate is not repeated once its times add up to this, even if they do not agree.
ESTIMATE_SECONDS = 0.2
# What a further stream costs in an estimate, over a step of one row.
STREAM_SHARE = 0.05


class Point(NamedTuple):
    """The size of a step that is timed."""

    context: int
    nodes: int


def measure(runner: ModelRunner, nodes: tuple[int, ...] = NODES) -> CostCurve:
    """Times steps of every size over a zeroed cache. Takes a second on a small model, a minute on a slow one.

    Times whole steps, sampled and with feedback: on a small model, a node costs as much outside the forward as inside. Rows
    have any tokens: in a mixture, equal ones would all use the same experts.
    """
    nodes, contexts = grid(runner, nodes)
    if not runner.can_assume:  # a text for each context would have to be read
        contexts = contexts[:2][-1:]
    streams = [started(runner, contexts[-1])]
    found = smallest_seconds(streams, [Point(context, count) for context in contexts for count in nodes])
    seconds = np.array([[found[Point(context, count)] for count in nodes] for context in contexts])
    streams.clear()  # frees the cache, which may have all pages
    streams += [started(runner, contexts[0]) for _ in range(STREAMS)]
    few, many = Point(contexts[0], 0), Point(contexts[0], STREAM_NODES)
    has_room = runner.max_rows >= STREAMS * (STREAM_NODES + 1) and seconds[0][-1] < DEAR_ROWS * seconds[0][0]
    found = smallest_seconds(streams, [few, many] if has_room else [few])
    one = np.interp(STREAMS - 1, nodes, seconds[0])  # the same rows in one stream
    stream_seconds = max(0.0, (found[few] - float(one)) / (STREAMS - 1))
    experts, rows = None, STREAMS * (STREAM_NODES + 1)
    if runner.experts is not None:
        streams[0].cache.assume(contexts[0])
        experts = few_steps(runner, streams[0].cache, nodes[: len(ESTIMATED)])[1]
    beyond = np.zeros(rows) if experts is None else experts.of(experts.touched(NO_ROWS, rows))  # those of one row
    seconds = np.maximum(seconds - beyond[list(nodes)], seconds[:, :1])
    row_seconds = (seconds[0][-1] - seconds[0][-3]) / (nodes[-1] - nodes[-3])
    if has_room:
        more = rows - (nodes[-1] + 1)  # rows beyond those of one stream's largest step
        row_seconds = (found[many] - beyond[-1] - seconds[0][-1] - stream_seconds * (STREAMS - 1)) / more
    return CostCurve(nodes, contexts, seconds, max(0.0, row_seconds), stream_seconds, experts)


def grid(runner: ModelRunner, nodes: tuple[int, ...] = NODES) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of nodes and the context lengths of the model's curve."""
    contexts = tuple(each for each in CONTEXTS if each + MAX_NODES < runner.context_tokens) or (1,)
    return (*(count for count in nodes if count < runner.draft_nodes), runner.draft_nodes), contexts


def started(runner: ModelRunner, context: int) -> Verifier:
    """A verifier after `context` zeros, which steps may exceed by MAX_NODES."""
    cache = runner.new_cache()
    verifier = Verifier(runner, cache)
    verifier.begin(np.zeros(context + 1, np.int32), SamplingParams(), max_tokens=MAX_NODES + 1)
    cache.fill(context)  # denormal numbers in fresh memory would be slow
    return verifier


def smallest_seconds(streams: list[Verifier], points: Sequence[Point]) -> dict[Point, float]:
    for point in points:
        if point.context == points[0].context:
            step_seconds(streams, point)  # the first step of a size allocates and chooses algorithms
    return smallest(points, lambda point: step_seconds(streams, point))


def smallest(points: Sequence[Point], seconds: Callable[[Point], float]) -> dict[Point, float]:
    """The smallest time of each point. Rounds over all points spread a disturbance over points rather than times."""
    times: dict[Point, list[float]] = {point: [] for point in points}
    for _ in range(MOST_ROUNDS):
        for point in points:
            if not settled(times[point]):
                times[point].append(seconds(point))
    return {point: min(found) for point, found in times.items()}


def settled(times: Sequence[float]) -> bool:
    """Whether a point's times are enough."""
    if len(times) < ROUNDS:
        return sum(times) >= POINT_SECONDS
    return agree(times) or sum(times) >= POINT_SECONDS


def agree(times: Sequence[float]) -> bool:
    """Whether the smallest times of a point agree, so that other work has disturbed neither."""
    first, second = sorted(times)[:2]
    return second <= AGREEMENT * first


def step_seconds(streams: Sequence[Verifier], point: Point) -> float:
    """Seconds of one step of all streams: the forward and the verdicts."""
    tokens = any_tokens(len(streams) * (point.nodes + 1), streams[0].runner.vocabulary).reshape(len(streams), -1)
    trees = [chain(nodes, np.ones(point.nodes, np.float32), Source.NONE) for nodes in tokens[:, 1:]]
    for stream, root in zip(streams, tokens[:, :1], strict=True):
        stream.sequence.begin(np.concatenate([np.zeros(point.context, np.int32), root]))
        stream.cache.assume(point.context)
    started_at = time.perf_counter()
    logits = streams[0].runner.forward_all([stream.segment(tree) for stream, tree in zip(streams, trees, strict=True)])
    verdicts = [stream.judge(tree, rows, FEEDBACK).verdict() for stream, tree, rows in zip(streams, trees, logits, strict=True)]
    seconds = time.perf_counter() - started_at
    for stream, verdict in zip(streams, verdicts, strict=True):
        stream.commit(verdict)
    return seconds


def any_tokens(count: int, vocabulary: int) -> NDArray[np.int32]:
    """The same ones at every call."""
    return np.random.default_rng(count).integers(vocabulary, size=count, dtype=np.int32)


def timed_forward(runner: ModelRunner, cache: KVCache, nodes: int, differ: bool = True, reads: bool = False) -> float:
    """Seconds of one forward over the root and a chain of `nodes`, including the greedy choice at each row.

    Tokens are any ones; unless they `differ`, the same one in each row. One that only `reads` has logits of its last row alone.
    """
    tokens = any_tokens(nodes + 1 if differ else 1, runner.vocabulary)
    batch = ForwardBatch.chain(np.resize(tokens, nodes + 1))
    started = time.perf_counter()
    in_place(runner.forward(cache, batch, not reads)).argmax(-1).tolist()  # waits for the device
    return time.perf_counter() - started


def load_or_measure(runner: ModelRunner, folder: Path | None) -> CostCurve:
    """The curve of this model on this machine: loaded from `folder`, or else estimated or measured.

    A measured one is saved there; an estimated one once steps have corrected it.
    """
    path = cost_file(runner, folder)
    if path is not None:
        try:
            return parse(path.read_text(), runner.draft_nodes)
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            log.warning("%s is not a cost curve (%s), so the cost of a step is measured again", path, error)
    if runner.is_steady:
        return estimate(runner)
    curve = measure(runner)
    save_finding(curve.state(), path)
    return curve


def estimate(runner: ModelRunner) -> CostCurve:
    """The curve through a few steps: of a server that starts in a second."""
    nodes, contexts = grid(runner)
    timed = nodes[: len(ESTIMATED)]
    cache = runner.new_cache()
    cache.assume(min(CONTEXTS[0], runner.context_tokens - timed[-1] - 1))
    found, experts = few_steps(runner, cache, timed)
    row = max(0.0, found[-1] - found[0]) / timed[-1]
    seconds = [[*found, *(found[-1] + (count - timed[-1]) * row for count in nodes[len(timed) :])]] * len(contexts)
    curve = CostCurve(nodes, contexts, seconds, row, STREAM_SHARE * found[0], experts)  # steps correct what further text costs
    curve.is_estimated = True
    return curve


def few_steps(runner: ModelRunner, cache: KVCache, nodes: Sequence[int]) -> tuple[list[float], ExpertCost | None]:
    """Seconds of steps of few nodes, timed in turns, without experts beyond those of one row.

    Of a mixture, a further step has equal tokens, which use fewer experts: the difference is what experts cost.
    """
    # Other work disturbs some. If it disturbed all steps of one row, further rows would seem free.
    times: dict[int, list[float]] = {count: [] for count in nodes}
    touched: dict[int, float] = {}
    for number in range(MOST_ROUNDS):
        for count, seconds in times.items():
            if number < ROUNDS or (sum(seconds) < ESTIMATE_SECONDS and not agree(seconds)):
                seconds.append(timed_forward(runner, cache, count))
                touched[count] = runner.touched
    found = [min(seconds) for seconds in times.values()]
    if runner.experts is None:
        return found, None
    (count, used), most, (one, *_, more) = runner.experts, nodes[-1], found
    equal = min(timed_forward(runner, cache, most, differ=False) for _ in range(2))
    of_one = min((more - equal) / max(1.0, touched[most] - runner.touched), (more - one) / max(1.0, touched[most] - used))
    experts = ExpertCost(count, used, max(0.0, of_one))
    return [seconds - float(experts.of(touched[place])) for place, seconds in zip(nodes, found, strict=True)], experts


def cost_file(runner: ModelRunner, folder: Path | None) -> Path | None:
    """The file of the model's curve on this machine."""
    return folder and folder / f"{machine_key(runner)}.json"


def machine_key(runner: ModelRunner) -> str:
    """A hash of what measurements depend on: model, dtype, machine, versions and threads."""
    shape = runner.cache_shape
    parts = [
        f"{runner.experts} experts, any tokens in every row, smallest of {ROUNDS} rounds over {NODES} and of {STREAMS} streams",
        f"invariant {runner.is_invariant}, {runner.backends}",
        runner.description,
        f"{shape.dtype} {shape.stored_dtype}",
        runner.library,
        *runner.machine,
    ]
    return digest([*parts, str(runner.context_tokens)])
