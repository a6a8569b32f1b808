"""Which layers of a target its drafts skip: a short measured search, whose finding is kept for the next start.

A set of layers is judged by how often the target without them agrees with the whole target's choices on texts that the target
has written, for the first drafted token and for the one after it, and by the time of its forward. Both give the expected speed.
The search starts from blocks of middle layers and from regular intervals, and then changes the best set layer by layer.
"""

from __future__ import annotations

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import PreTrainedTokenizerBase

from outrider.verify.draft_model.runner import short_cache
from outrider.verify.errors import ModelError
from outrider.verify.findings import save_finding
from outrider.verify.measurement import machine_key, timed_forward
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cache.kv_cache import KVCache
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.segment import Segment
from outrider.verify.self_draft.layers import LayerSkipper

log = logging.getLogger("outrider.worker")
SEARCH_SECONDS = 5.0
VERSION = 1  # of saved findings
DEPTH = 2  # drafted tokens whose agreement is measured
GENERATION_SECONDS = 2.0
TOKENS = 16  # of each text that the target continues
TIMED_FORWARDS = 5
TIMED_NODES = 8
LONGEST_DRAFT = 10
LEAST_SPEED = 1.1  # relative to plain decoding; the forecast does not count the host's work on drafts
PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def count_words(text):\n    counts = {}\n    for",
    "import os\n\n\nclass Stack:\n    def __init__(self",
    "Question: Why is the sky blue?\nAnswer:",
    "1. Wash the vegetables.\n2.",
    "The most important result of this work is",
    '{"name": "Ada", "year": 1815, "city":',
)

Layers = frozenset[int]


@dataclass(frozen=True)
class Finding:
    """The layers to skip, and what was measured without them."""

    skipped: tuple[int, ...]
    agreement: tuple[float, ...]  # of each drafted token with the target's choice, if those before it agree
    row_cost: float  # of each further row that the target verifies, relative to a step

    def speed(self, ratio: float) -> float:
        """Expected speed relative to plain decoding, with the best length; a target's step takes `ratio` drafted tokens."""
        best, tokens, accepted = 0.0, 1.0, 1.0
        for drafted in range(1, LONGEST_DRAFT + 1):
            accepted *= self.agreement[min(drafted, len(self.agreement)) - 1]
            tokens += accepted
            best = max(best, tokens / (1 + drafted * (1 / ratio + self.row_cost)))
        return best


class OwnText(NamedTuple):
    """A text that the target has continued by its own choices. Its rows are in the cache, none of them committed."""

    cache: KVCache
    tokens: torch.Tensor  # int64 [N]
    prompt_length: int

    @property
    def starts(self) -> torch.Tensor:
        """The tokens after which drafts are judged, int64 [M]."""
        return torch.arange(self.prompt_length - 1, len(self.tokens) - DEPTH)

    @property
    def places(self) -> torch.Tensor:
        """The tokens of the drafts, int64 [DEPTH * M]: those after which the first one is drafted, then the second one."""
        return torch.cat([self.starts + depth for depth in range(DEPTH)])

    @property
    def drafts(self) -> Segment:
        """Drafts of DEPTH tokens after each start, over the target's rows before it. Every draft is the text's."""
        size, places, count = len(self.tokens), self.places, len(self.starts)
        ancestors = torch.zeros(size + len(places), size + len(places), dtype=torch.bool)
        ancestors[size:, :size] = torch.arange(size) < self.starts.repeat(DEPTH)[:, None]
        depths = torch.arange(DEPTH).repeat_interleave(count)
        ancestors[size:, size:] = torch.eye(count, dtype=torch.bool).repeat(DEPTH, DEPTH) & (depths[:, None] >= depths)
        positions = torch.cat([torch.arange(size), places])
        return Segment(self.cache, ForwardBatch(self.tokens[positions], positions, ancestors, known=size))

    def agrees(self, logits: torch.Tensor) -> torch.Tensor:
        """Whether the likeliest token after each of the drafts' rows is the text's, bool [DEPTH, M]."""
        return (logits.argmax(-1).cpu() == self.tokens[self.places + 1]).view(DEPTH, -1)


def own_texts(target: ModelRunner, prompts: Sequence[list[int]], seconds: float = GENERATION_SECONDS) -> list[OwnText]:
    """Continues all prompts together, by up to TOKENS tokens each, for at most about `seconds`."""
    ends_at = time.perf_counter() + seconds
    texts, caches = [list(prompt) for prompt in prompts], [target.new_cache() for _ in prompts]
    new = [torch.tensor(text) for text in texts]
    for count in range(min(TOKENS, target.context_tokens - max(map(len, texts)))):
        if count > DEPTH and time.perf_counter() > ends_at:
            break
        rows = target.forward_all([Segment(*each) for each in zip(caches, map(ForwardBatch.chain, new), strict=True)])
        for text, cache, tokens, logits in zip(texts, caches, new, rows, strict=True):
            cache.length += len(tokens)
            text.append(int(logits[-1].argmax()))
        new = [torch.tensor(text[-1:]) for text in texts]
    for cache in caches:
        cache.length = 0
    return [OwnText(cache, torch.tensor(text), len(prompt)) for cache, text, prompt in zip(caches, texts, prompts, strict=True)]


class Measurement:
    """Measures a started target without some of its layers. Raises ModelError for one that cannot skip any."""

    def __init__(self, target: ModelRunner, prompts: Sequence[list[int]]) -> None:
        """`prompts` are token ids."""
        self.skipper = LayerSkipper(target)
        self._texts = own_texts(target, prompts)
        half = range(self.skipper.layers // 2)
        whole_seconds, half_seconds = (_seconds(self.skipper.without(skipped), 0) for skipped in ((), half))
        self._layer_cost = max(0.0, 1 - half_seconds / whole_seconds) / len(half)
        self._row_cost = max(0.0, _seconds(target, TIMED_NODES) / _seconds(target, 0) - 1) / TIMED_NODES

    def find(self, skipped: Layers) -> Finding:
        """The agreement without these layers. Raises ModelError if the forward fails."""
        logits = self.skipper.without(skipped).forward_all([text.drafts for text in self._texts])
        parts = [text.agrees(rows) for text, rows in zip(self._texts, logits, strict=True)]
        agreement, before = [], torch.ones(sum(each.shape[1] for each in parts), dtype=torch.bool)
        for level in torch.cat(parts, 1):
            agreement.append(float((level & before).sum()) / max(1, int(before.sum())))
            before &= level
        return Finding(tuple(sorted(skipped)), tuple(agreement), self._row_cost)

    def speed(self, finding: Finding) -> float:
        """The expected speed, from the number of layers."""
        return finding.speed(1 / max(1e-3, 1 - self._layer_cost * len(finding.skipped)))


def _seconds(runner: ModelRunner, nodes: int) -> float:
    cache = short_cache(runner)
    timed_forward(runner, cache, nodes)
    return statistics.median(timed_forward(runner, cache, nodes) for _ in range(TIMED_FORWARDS))


def first_sets(layers: int) -> Iterator[Layers]:
    """The sets to begin with; none has the first layer, or the last, which brings states back from another device."""
    for step, share in ((4, 1 / 4), (3, 1 / 3), (2, 1 / 2), (1, 3 / 4)):
        count = max(1, round(layers * share))
        yield frozenset(range((layers - count + 1) // 2, (layers + count + 1) // 2)) - {0, layers - 1}
        yield frozenset(range(step // 2, layers - 1, step)) - {0}


def neighbours(skipped: Layers, layers: int) -> Iterator[Layers]:
    """The sets that differ in one layer, or that have a layer in the place of its neighbour."""
    for layer in range(1, layers - 1):
        yield skipped ^ {layer}
    for layer in sorted(skipped):
        for other in {layer - 1, layer + 1} - skipped - {0, layers - 1}:
            yield skipped - {layer} | {other}


def search(measurement: Measurement, seconds: float = SEARCH_SECONDS) -> Finding:
    """The set with the highest expected speed among those that were measured in `seconds`. Raises ModelError without one."""
    layers, ends_at = measurement.skipper.layers, time.perf_counter() + seconds
    speeds: dict[Layers, float] = {}
    best: Finding | None = None

    def consider(candidates: Iterator[Layers]) -> bool:
        """Whether one of them is better than the best so far."""
        nonlocal best
        before = best
        for skipped in candidates:
            if not skipped or skipped in speeds or len(skipped) >= layers:
                continue
            if best is not None and time.perf_counter() > ends_at:
                break
            try:
                found = measurement.find(skipped)
            except ModelError:
                continue  # another layer needs one of these
            speeds[skipped] = measurement.speed(found)
            if best is None or speeds[skipped] > speeds[frozenset(best.skipped)]:
                best = found
        return best is not before

    improved = consider(first_sets(layers))
    while improved and best is not None:
        improved = consider(neighbours(frozenset(best.skipped), layers))
    if best is None:
        raise ModelError("No layer of the target can be skipped; set draft_model.path to a draft model.")
    log.info("self-speculation measured %d sets of layers to skip", len(speeds))
    return best


def load_or_search(target: ModelRunner, tokenizer: PreTrainedTokenizerBase, folder: Path | None) -> Finding:
    """The finding for this model on this machine: loaded from `folder`, or searched for and saved there. Raises ModelError."""
    file = None if folder is None else folder / f"{machine_key(target)}-{weights_key(target)}-layers.json"
    found = None if file is None else _saved(file)
    if found is None:
        found = search(Measurement(target, [cast("list[int]", tokenizer.encode(prompt)) for prompt in PROMPTS]))
        save_finding({"version": VERSION, **asdict(found)}, file)
    return found


def weights_key(target: ModelRunner) -> str:
    """A hash by which models of one shape differ: the path and a part of the weights."""
    digest = hashlib.sha256(str(target.model.config.name_or_path).encode())
    for parameter in target.model.parameters():
        if parameter.ndim == 1 and parameter.is_floating_point():
            digest.update(parameter.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()[:8]


def _saved(file: Path) -> Finding | None:
    try:
        saved = json.loads(file.read_text())
        if saved.pop("version") != VERSION:
            return None
        found = Finding(tuple(map(int, saved["skipped"])), _numbers(saved["agreement"]), float(saved["row_cost"]))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return found if found.skipped and found.agreement else None


def _numbers(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(map(float, values))
