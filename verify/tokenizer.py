"""Whether a draft model can draft for a target: both must read and write the same tokens."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any, cast

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verify.errors import ModelError, check_path, first_sentence


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`; raises ModelError."""
    check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"No tokenizer at {path!r}: {first_sentence(error)}") from None
    return cast(PreTrainedTokenizerBase, tokenizer)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary: equal for two tokenizers exactly when every id means the same token."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def check_pair(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises ModelError with the first difference between the tokenizers. Padding behind the vocabulary does not matter."""
    difference = first_difference(target, draft)
    if difference is not None:
        raise ModelError(f"The draft model cannot draft for this target: {difference}; choose one of the target's own family.")


def first_difference(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> str | None:
    """Half a sentence; None where every id means the same token and texts are cut alike."""
    ours, theirs = ({number: token for token, number in each.get_vocab().items()} for each in (target, draft))
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            words = [f"is {each[number]!r}" if number in each else "does not exist" for each in (ours, theirs)]
            return f"token {number} {words[0]} for the target and {words[1]} for the draft"
    for number, (one, other) in enumerate(itertools.zip_longest(merges(target), merges(draft))):
        if one != other:
            return f"merge {number} is {one!r} for the target and {other!r} for the draft"
    return None


def merges(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    """The merge rules, in order; none where the tokenizer does not merge."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    return list(model.get("merges") or [])
