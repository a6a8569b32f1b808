"""What ablations are measured with: recorded answers and corpora in one vocabulary, and the embedded pair of models.

Everything is loaded when it is first used.
"""

from __future__ import annotations

import statistics
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bench.ablations.decoding import NODES, Decoding, decode_all
from bench.ablations.size import Row, Size
from bench.decode import encode
from bench.plan import PROMPTS, read_prompts
from bench.recordings import Encoder, Line, index_tokens, load_corpus, load_encoder, load_stream
from bench.replay import Tally, replay
from outrider import models
from outrider.drafters.interface import Drafter, Ints
from outrider.drafters.options import DrafterName, Options
from outrider.drafters.registry import Resources, make
from outrider.server.settings import load_settings
from outrider.server.worker.runtime import Runtime, load
from outrider.verify.sampling_params import SamplingParams

StreamName = Literal["chat", "code"]
CorpusName = Literal["chat", "library", "none"]
Result = TypeVar("Result")
# The number of indexes that are kept.
INDEXES = 3
GREEDY = SamplingParams(temperature=0)


@dataclass(frozen=True)
class Recordings:
    """Files of recorded answers."""

    chat: Path  # a chat model's, greedy
    code: Path  # a code model's, sampled
    corpus: Sequence[Path]  # chats of other models
    tokenizer: str


class Material:
    """Recordings, corpora and models, and the measurements that ablations share."""

    def __init__(self, size: Size, recordings: Recordings | None) -> None:
        self.size = size
        self._recordings = recordings
        self._tokens: dict[CorpusName, NDArray[np.uint32]] = {"none": np.empty(0, np.uint32)}
        self._lines: dict[StreamName, list[Line]] = {}
        self._indexed: OrderedDict[tuple[CorpusName, float, int], Resources] = OrderedDict()  # newest last
        self._results: dict[Any, Any] = {}

    def once(self, key: object, measure: Callable[[], Result]) -> Result:
        """The result of `measure`, which runs only at the first call with this key."""
        if key not in self._results:
            self._results[key] = measure()
        result: Result = self._results[key]
        return result

    @cached_property
    def _encoder(self) -> Encoder:
        assert self._recordings is not None
        return load_encoder(self._recordings.tokenizer)

    def lines(self, stream: StreamName) -> list[Line]:
        """The recorded answers of a stream."""
        assert self._recordings is not None
        if stream not in self._lines:
            self._lines[stream] = load_stream(getattr(self._recordings, stream), self._encoder, self.size.lines)[0]
        return self._lines[stream]

    def corpus(self, name: CorpusName, share: float = 1.0) -> NDArray[np.uint32]:
        """The first `share` of a corpus: chats, or modules of Python's standard library. Token ids, uint32 [N]."""
        if name not in self._tokens:
            modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[: self.size.modules]
            paths = self._recordings.corpus if name == "chat" and self._recordings else modules
            self._tokens[name] = load_corpus(paths, self._encoder)
        tokens = self._tokens[name]
        return tokens[: int(share * len(tokens))]

    def resources(self, options: Options, corpus: CorpusName, share: float) -> Resources:
        """Drafters' resources with a share of a corpus. The last few stay indexed."""
        key = (corpus, share, options.trigram.order)
        if key not in self._indexed:
            self._indexed[key] = index_tokens(self.corpus(corpus, share), len(self._encoder), options)
            if len(self._indexed) > INDEXES:
                self._indexed.popitem(last=False)
        self._indexed.move_to_end(key)
        return replace(self._indexed[key], options=options)

    def replay(
        self,
        stream: StreamName | Sequence[Line],
        name: DrafterName,
        options: Options | None = None,
        corpus: CorpusName = "chat",
        share: float = 1.0,
        nodes: int = NODES,
        new: Callable[[Resources], Drafter] | None = None,
        carry: bool = False,
    ) -> Tally:
        """One drafter over recorded answers. `new` makes another drafter than that of this name.

        With `carry`, what it learns from an answer serves the next ones; otherwise, each has a new drafter.
        """
        options, tally = options or Options(), Tally()
        resources = self.resources(options, corpus, share)
        drafter: Drafter | None = None
        for line in self.lines(stream) if isinstance(stream, str) else stream:
            if drafter is None or not carry:
                drafter = new(resources) if new else make(name, resources)
            replay(drafter, line, nodes, tally)
        return tally

    @cached_property
    def _runtime(self) -> Runtime:
        pair = {"model.dtype": "float32", "draft_model.dtype": "float32", "draft_model.path": str(models.DRAFT)}
        return load(load_settings(None, {**pair, "model.threads": "1", "speculation.max_nodes": "24"}))

    @cached_property
    def _prompts(self) -> list[Ints]:
        return [encode(self._runtime, prompt) for prompt in read_prompts(PROMPTS, self.size.prompts)]

    def decode(self, name: DrafterName, params: SamplingParams = GREEDY, **changed: Any) -> Decoding:
        """One drafter's answers of the embedded pair, decoded once.

        `changed` holds options, draft_tree={"children": 2}, and possibly the number of `nodes`.
        """
        return self.once((name, str(params), str(changed)), lambda: self.decode_again(name, params, **changed))

    def decode_again(self, name: DrafterName, params: SamplingParams = GREEDY, **changed: Any) -> Decoding:
        """As `decode`, for figures that depend on time."""
        resources, nodes = self._runtime.resources, changed.pop("nodes", NODES)
        if name == "fusion":  # how often it uses the draft model depends on measured times
            resources = replace(resources, model=None)
        options = {drafter: replace(getattr(resources.options, drafter), **fields) for drafter, fields in changed.items()}
        resources = replace(resources, options=replace(resources.options, **options))
        return decode_all(self._runtime, resources, name, self._prompts, params, self.size.max_tokens, nodes)

    def speed(self, name: DrafterName, params: SamplingParams = GREEDY, **changed: Any) -> Row:
        """Speed relative to plain decoding: rounds take turns, the first one warms up."""
        ratios: list[float] = []
        for round in range(self.size.rounds + 1):
            plain, drafted = self.decode_again("none", params), self.decode_again(name, params, **changed)
            if round:
                ratios.append(drafted.tokens_per_second / plain.tokens_per_second)
        return {"speed-up": statistics.median(ratios)}
