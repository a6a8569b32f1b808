"""SGLang's worker with our drafts, in a stand-in with the interface of SGLang 0.5.23: requests begin, end and are paused."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.drafters.interface import Ints
from outrider.engines import sglang

VOCABULARY, NODES = 50, 8


class NGRAMWorker:
    """The part of SGLang's worker that decides what is asked of the drafts, and when."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap = server_args.overlap
        self.draft_token_num = server_args.speculative_num_draft_tokens
        self.max_trie_depth = 3
        self.ngram_corpus: Any = None
        self._before: set[str] = set()

    def _prepare_draft_tokens(self, batch: Any) -> Any:
        ids, tails, lengths = [], [], []
        for request, late in zip(batch.reqs, batch.late, strict=True):
            text = [*request.origin_input_ids_unpadded, *request.output_ids, *late]
            ids.append(request.rid)
            tails.append(text[-self.max_trie_depth :])
            lengths.append(len(text))
        self.ngram_corpus.synchronize()
        return self.ngram_corpus.batch_get(ids, tails, lengths)

    def decode(self, batch: Any) -> list[list[int]]:
        """A step; returns the tokens that it emits for each request."""
        tokens, mask = self._prepare_draft_tokens(batch)
        count = len(batch.reqs)
        trees = zip(tokens.reshape(count, -1), mask.reshape(count, self.draft_token_num, -1), batch.answers, strict=True)
        emitted = [accepted(*tree) for tree in trees]
        self.ngram_corpus.batch_put([[]] * count)
        now = {request.rid for request in batch.reqs}
        self.ngram_corpus.erase_match_state([*(self._before - now)])
        self._before = now
        return emitted


def accepted(tokens: Ints, mask: Any, answer: list[int]) -> list[int]:
    """The tokens of the accepted path and the one after it. A node's parent is its last ancestor."""
    parents = [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(tokens))]
    node = 0
    found: list[int] = []
    while len(found) < len(answer):
        found.append(answer[len(found)])
        children = [i for i, parent in enumerate(parents) if parent == node and tokens[i] == found[-1]]
        if not children:
            break
        node = children[0]
    return found


REGISTERED: dict[str, Any] = {}  # the algorithm, what makes its worker, and whether it supports overlap


def register(name: str, *, supports_overlap: bool, spec_class: Any) -> Callable[[Any], None]:
    return lambda factory: REGISTERED.update({name: (spec_class(), factory, supports_overlap)})


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SimpleNamespace(register=register)},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": object},
    }
    for name in ("sglang", "sglang.srt", "sglang.srt.speculative", *modules):
        module = ModuleType(name)
        module.__dict__.update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def arguments(**fields: Any) -> Any:
    """SGLang's arguments, as the command line leaves them."""
    unset = ("num_draft_tokens", "num_steps", "eagle_topk", "ngram_external_corpus_path")
    given = {f"speculative_{name}": None for name in unset} | {"speculative_ngram_max_bfs_breadth": 10}
    return SimpleNamespace(**given | {"max_running_requests": None, "enable_mixed_chunk": True} | fields)


def worker(overlap: bool) -> Any:
    sglang.register()
    algorithm, factory, _ = REGISTERED["OUTRIDER"]
    given_arguments = arguments(overlap=overlap, speculative_num_draft_tokens=NODES)
    algorithm.handle_server_args(given_arguments)
    target = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCABULARY))
    return factory(given_arguments)(given_arguments, 0, 0, target)


class Requests:
    """Requests whose answers are known. With overlap, SGLang processes what a step emits one step later."""

    def __init__(self, overlap: bool) -> None:
        self.worker, self.overlap = worker(overlap), overlap
        self.running: dict[str, Any] = {}
        self.steps = 0

    def add(self, name: str, prompt: Ints, answer: Ints) -> None:
        request = SimpleNamespace(rid=name, origin_input_ids_unpadded=prompt.tolist(), output_ids=[])
        first, rest = answer[:1].tolist(), answer[1:].tolist()
        self.running[name] = SimpleNamespace(request=request, late=first, rest=rest)

    def step(self, paused: str | None = None) -> None:
        taking_part = [each for name, each in self.running.items() if name != paused]
        for each in taking_part:
            if not self.overlap:
                each.request.output_ids += each.late
                each.late = []
        if not taking_part:
            return
        requests, late, answers = zip(*((each.request, each.late, each.rest) for each in taking_part), strict=True)
        batch = SimpleNamespace(reqs=requests, late=late, answers=answers)
        for each, emitted in zip(taking_part, self.worker.decode(batch), strict=True):
            each.request.output_ids += each.late
            each.late, each.rest = emitted, each.rest[len(emitted) :]
        self.running = {name: each for name, each in self.running.items() if each.rest}
        self.steps += 1


def text(seed: int, size: int) -> Ints:
    """A text that repeats itself."""
    return np.resize(np.random.default_rng(seed).integers(3, 40, 9), size).astype(np.int32)


@pytest.mark.parametrize("overlap", [False, True])
def test_repeated_text_is_drafted(overlap: bool) -> None:
    requests = Requests(overlap)
    requests.add("one", text(1, 40), text(1, 100)[40:])
    while requests.running:
        requests.step()
    assert requests.steps <= 60 / 4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(2, 40)), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=20),
)
def test_sessions_have_the_text_of_their_requests_and_end_with_them(
    overlap: bool, requests: list[tuple[int, int, int]], pauses: list[int]
) -> None:
    running = Requests(overlap)
    waiting = [(str(index), *each) for index, each in enumerate(requests)]
    pausing = iter(pauses)
    while waiting or running.running:
        if waiting:
            name, seed, prompt, answer = waiting.pop()
            running.add(name, text(seed, prompt), text(seed + 1, answer))
        running.step(str(next(pausing, None)))
        sessions = running.worker.ngram_corpus.sessions
        for name, each in running.running.items():
            if name in sessions:
                known = [*each.request.origin_input_ids_unpadded, *each.request.output_ids]
                assert sessions[name].tokens.tolist() == known[: len(sessions[name].tokens)]
    running.worker.ngram_corpus.reset()
    assert not running.worker.ngram_corpus.sessions


def test_a_tree_without_drafts_is_a_root_and_padding() -> None:
    drafts = sglang.Drafts(VOCABULARY, NODES, "none")
    drafts.begin("one", [7, 8])
    tokens, mask = drafts.batch_get(["one"], [[7, 8]], [2])
    assert tokens.tolist() == [8] + [0] * (NODES - 1)
    ancestors = mask.reshape(NODES, NODES)
    assert ancestors[:, 0].all() and ancestors.sum() == 2 * NODES - 1


def test_arguments() -> None:
    given_arguments = arguments()
    sglang.set_defaults(given_arguments)
    assert given_arguments.speculative_num_draft_tokens == 12 and given_arguments.max_running_requests == 48
    assert given_arguments.speculative_eagle_topk == 10 and given_arguments.speculative_num_steps == 1
    assert not given_arguments.enable_mixed_chunk
    with pytest.raises(ValueError, match="drafts from no external corpora"):
        sglang.set_defaults(arguments(speculative_ngram_external_corpus_path="a"))
    with pytest.raises(ValueError, match="drafts from no external corpora"):
        sglang.Drafts(VOCABULARY, NODES, "none").load_external_corpus_named("a", [[1]])


def test_it_is_a_plugin() -> None:
    sglang.register()
    algorithm, factory, supports_overlap = REGISTERED["OUTRIDER"]
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and supports_overlap
    assert issubclass(factory(None), NGRAMWorker)
