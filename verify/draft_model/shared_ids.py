"""Which token ids a target and its draft model share.

Both must split texts alike. Their tokens may differ in what no text is split into: added tokens, such as those of a chat
template, and padding of the vocabulary. A draft model never drafts such a token. It reads it as its own token of that name, or
else as the first token of the name's text: whatever it reads, answers are the target's.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from outrider.verify.errors import ModelError
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.sampling.rows import Logits, uploaded


class SharedIds:
    """How a draft model reads a target's ids, and which of its own it never drafts."""

    def __init__(self, target: int, draft: int, differences: Mapping[int, int]) -> None:
        """The models have `target` and `draft` logits; `differences` are those of `find_differences`."""
        own = np.arange(target, dtype=np.int32)
        for id, read in differences.items():
            own[id : id + 1] = read
        self.own = np.where(own < draft, own, 0).astype(np.int32)  # [target]; the draft model's id of each of the target's
        self._never = np.array([id for id in differences if id < min(target, draft)], np.int32)

    def drafted(self, logits: Logits) -> Logits:
        """Of the draft model's logits [R, V], those of ids that the target has. Of other tokens they are set to -inf."""
        found = logits[:, : len(self.own)]
        if len(self._never):
            found[:, uploaded(self._never, found)] = -np.inf
        return found


def find_differences(target: AnyTokenizer, draft: AnyTokenizer) -> dict[int, int]:
    """The ids that are not the same token in both, each with the id by which the draft model reads the target's.

    Raises ModelError with the first difference between the tokenizers that matters.
    """
    target_ids, draft_ids = ({id: token for token, id in each.get_vocab().items()} for each in (target, draft))
    differing = sorted(id for id in target_ids.keys() | draft_ids.keys() if target_ids.get(id) != draft_ids.get(id))
    apart = {None} | tokens_apart(target) | tokens_apart(draft)
    for id in differing:
        if not {target_ids.get(id), draft_ids.get(id)} <= apart:
            clauses = [f"is {ids[id]!r}" if id in ids else "does not exist" for ids in (target_ids, draft_ids)]
            raise unlike(f"token {id} {clauses[0]} for the target and {clauses[1]} for the draft")
    for rank, (one, other) in enumerate(itertools.zip_longest(merges(target), merges(draft))):
        if one != other:
            raise unlike(f"merge {rank} is {one!r} for the target and {other!r} for the draft")
    return {id: id_of(target_ids[id], draft) if id in target_ids else 0 for id in differing}


def unlike(difference: str) -> ModelError:
    """The error of two tokenizers that differ."""
    return ModelError(f"The draft model cannot draft for this target: {difference}; choose one of the target's model family.")


def tokens_apart(tokenizer: AnyTokenizer) -> set[str | None]:
    """The tokens that no text is split into: added ones, and those that a file marks as unused."""
    added = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return added.union(getattr(tokenizer, "unused_tokens", ()))


def merges(tokenizer: AnyTokenizer) -> list[Any]:
    """The BPE merge rules in order; empty for other kinds of tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    return list(model.get("merges") or [])


def id_of(token: str, draft: AnyTokenizer) -> int:
    """The id by which the draft model reads a token of the target's; 0 if its text has none."""
    known = draft.get_vocab().get(token)
    ids = draft.encode(token, add_special_tokens=False) if known is None else [known]
    return int(ids[0]) if ids else 0
