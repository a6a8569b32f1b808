"""SGLang: `--speculative-algorithm OUTRIDER`, which SGLang finds as a plugin once this package is installed beside it.

The worker is SGLang's own n-gram worker with other drafts: SGLang verifies their trees, samples, and moves the keys and values.
Written for the interface of SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.drafters.interface import DraftTree, Ints
from outrider.drafters.library import LearnedText, Resources, Session
from outrider.drafters.options import DrafterName

NAME = "OUTRIDER"
# As SGLang's defaults for its own n-gram drafts.
NODES, MAX_REQUESTS = 12, 48
# SGLang passes this many times a draft's tokens from the end of a text, which holds those of the last step.
TAIL = 2
NO_CORPORA = f"{NAME} drafts from no external corpora; leave them out, or choose NGRAM."


class Drafts:
    """Trees for the requests of a batch, in place of SGLang's `NgramCorpus`.

    Each request has a session from its first step to the one after its last. What the answers said stays in one text of
    `learned_tokens` tokens, from which later requests draft, whoever sent them; 0 turns that off.
    """

    def __init__(
        self, vocabulary: int, nodes: int, drafter: DrafterName = "fusion", least: float = 0.0, learned_tokens: int = 1 << 16
    ) -> None:
        """A tree has `nodes` rows with its root, each of a path probability above `least`.

        Raises ValueError if there is no such drafter.
        """
        self._nodes, self._drafter, self._least = nodes, drafter, least
        self._learned = LearnedText(learned_tokens, vocabulary) if learned_tokens else None
        self._resources = Resources(corpus=self._learned or (), vocabulary=vocabulary)
        self.sessions: dict[str, Session] = {}  # by request
        Session(drafter, self._resources)

    def begin(self, request: str, text: ArrayLike) -> None:
        """Makes the session of a request that has none, with its text so far, token ids [T]."""
        if request not in self.sessions:
            self.sessions[request] = session = Session(self._drafter, self._resources)
            session.begin(text)

    def batch_get(
        self, requests: Sequence[str], tails: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The trees of all requests: tokens [B * N] and, of each node, itself and its ancestors, [B * N * N].

        `tails` are the ends of their texts, which have `lengths` tokens. Node 0 is the last token; missing nodes repeat
        token 0 below it.
        """
        trees = [self._tree(*each) for each in zip(requests, tails, lengths, strict=True)]
        return np.concatenate([tokens for tokens, _ in trees]), np.concatenate([mask.ravel() for _, mask in trees])

    def erase_match_state(self, requests: Iterable[str]) -> None:
        """Ends the sessions of requests that have left the batch."""
        for request in requests:
            session = self.sessions.pop(request, None)
            if session is not None:
                if self._learned is not None:
                    self._learned.add(request, session.tokens)
                session.end()

    def reset(self) -> None:
        """Ends all sessions, as when SGLang flushes its cache."""
        self.erase_match_state([*self.sessions])

    def batch_put(self, tails: Sequence[Sequence[int]]) -> None:
        """Nothing: sessions have read these tokens."""

    def synchronize(self) -> None:
        """Nothing: sessions learn in `batch_get`."""

    def list_external_corpora(self) -> dict[str, int]:
        """None."""
        return {}

    def load_external_corpus_named(self, name: str, chunks: Iterable[Sequence[int]]) -> int:
        """Raises ValueError."""
        raise ValueError(NO_CORPORA)

    def remove_external_corpus(self, name: str) -> None:
        """Raises ValueError."""
        raise ValueError(NO_CORPORA)

    def _tree(self, request: str, tail: Sequence[int], length: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        session = self.sessions[request]
        if (new := length - len(session.tokens)) > 0:
            session.observe(tail[-new:])
        return rows_of(session.propose(self._nodes - 1, self._least), int(tail[-1]), self._nodes)


def rows_of(tree: DraftTree, root: int, nodes: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens [N] and the mask [N, N] of a tree below the token `root`."""
    tokens, mask = np.zeros(nodes, np.int64), np.eye(nodes, dtype=bool)
    tokens[0], tokens[1 : 1 + len(tree)] = root, tree.tokens
    mask[:, 0] = True
    for node, parent in enumerate(tree.parents.tolist(), 1):
        mask[node] |= mask[1 + parent]
    return tokens, mask


def register() -> None:
    """Registers the algorithm. SGLang calls it as a plugin; a program with an engine of its own calls it first."""
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class Algorithm(CustomSpecAlgo):  # type: ignore[misc]
        """Verified as SGLang's n-gram drafts."""

        def is_ngram(self) -> bool:
            return True

        def has_draft_kv(self) -> bool:
            return False

        def handle_server_args(self, server_args: Any) -> None:
            set_defaults(server_args)

    SpeculativeAlgorithm.register(NAME, supports_overlap=True, spec_class=Algorithm)(lambda _: worker_class())


def set_defaults(arguments: Any) -> None:
    """Sets SGLang's defaults for its own n-gram drafts. Raises ValueError for arguments that this algorithm does not have."""
    if arguments.speculative_ngram_external_corpus_path is not None:
        raise ValueError(NO_CORPORA)
    arguments.speculative_num_draft_tokens = arguments.speculative_num_draft_tokens or NODES
    arguments.speculative_eagle_topk = arguments.speculative_ngram_max_bfs_breadth
    arguments.speculative_num_steps = arguments.speculative_num_steps or max(
        1, arguments.speculative_num_draft_tokens // arguments.speculative_eagle_topk
    )
    arguments.max_running_requests = arguments.max_running_requests or MAX_REQUESTS
    arguments.enable_mixed_chunk = False


def worker_class() -> type[Any]:
    """The worker, a class of SGLang's."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    class Worker(NGRAMWorker):  # type: ignore[misc]
        """SGLang's n-gram worker with `Drafts`."""

        def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
            super().__init__(server_args, gpu_id, nccl_port, target_worker)
            self.ngram_corpus = Drafts(target_worker.model_config.vocab_size, self.draft_token_num)
            self.max_trie_depth = TAIL * self.draft_token_num

        def _prepare_draft_tokens(self, batch: Any) -> Any:
            for request in batch.reqs:
                self.ngram_corpus.begin(request.rid, text_of(request))
            return super()._prepare_draft_tokens(batch)

    return Worker


def text_of(request: Any) -> Ints:
    """A request's prompt and what of its answer SGLang has processed, int32 [T]."""
    prompt, answer = (np.asarray(ids, np.int32) for ids in (request.origin_input_ids_unpadded, request.output_ids))
    return np.concatenate([prompt, answer])
