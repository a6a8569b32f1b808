"""Loads tokenizers, and checks whether a draft model and its target share one."""

from __future__ import annotations

import hashlib
import itertools
import json
from typing import Any, cast

from outrider.verify.checkpoint import DEFAULT_REVISION, locate
from outrider.verify.errors import ModelError, loading
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.gguf import llama_package
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.tokenizer import UnknownTokenizer, build_tokenizer
from outrider.verify.gguf.vocabulary import Vocabulary
from outrider.verify.hub import model_file, model_folder
from outrider.verify.packages import TRANSFORMERS, require
from outrider.verify.tokenizer_file import FILES, TOKENIZER, has_own_code, read_tokenizer
from outrider.verify.turns import tokens_after_answer, tokens_within_answer


def load_tokenizer(path: str, trust_remote_code: bool = False, revision: str = DEFAULT_REVISION) -> AnyTokenizer:
    """The tokenizer of the model at `path`; raises ModelError."""
    location = locate(path, revision)
    with loading(f"The tokenizer of {path!r}"):
        if location.gguf is not None:
            return gguf_tokenizer(str(model_file(location.source, location.gguf, revision)), path)
        folder = model_folder(location.source, revision, FILES)
        if (folder / TOKENIZER).is_file() and not (trust_remote_code and has_own_code(folder)):
            return read_tokenizer(folder)
        require(f"The tokenizer of {path!r}, which is not in a {TOKENIZER},", TRANSFORMERS)
        return load_by_transformers(location.source, trust_remote_code, revision)


def load_by_transformers(source: str, trust_remote_code: bool = False, revision: str = DEFAULT_REVISION) -> AnyTokenizer:
    """The tokenizer of a folder or a hub id as transformers has it. Raises whatever transformers raises."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(
        source,
        trust_remote_code=trust_remote_code,
        revision=revision,
        mistral_format=False,  # mistral-common's own class, if installed, has neither chat templates nor added tokens
    )
    tokenizer.clean_up_tokenization_spaces = False  # some models' files ask for it, but it changes code, such as `a ? b`
    return tokenizer


def gguf_tokenizer(file: str, path: str) -> AnyTokenizer:
    """The tokenizer of a GGUF file: built from its entries, or else llama.cpp's, if that is installed. Raises ModelError."""
    entries = read_metadata(file).entries
    try:
        return build_tokenizer(entries, path)
    except UnknownTokenizer:
        if not llama_package.is_installed():
            raise
    require(f"The tokenizer of {path!r}, which llama.cpp reads,", TRANSFORMERS)
    from outrider.verify.gguf.llama_tokenizer import LlamaTokenizer

    return LlamaTokenizer(file, Vocabulary(entries, path))


def stop_ids(ends: frozenset[int], tokenizer: AnyTokenizer) -> frozenset[int]:
    """Token ids that end an answer: those that the model, its tokenizer and a GGUF file name, and likely ones.

    Those are tokens of a GGUF file with texts that end answers, and what the chat template writes after an answer; some models
    name only the end of a text, which is none of a turn. What the template writes within an answer does not end it.
    """
    eos = [] if tokenizer.eos_token_id is None else [int(cast(Any, tokenizer.eos_token_id))]
    named = ends.union(eos, getattr(tokenizer, "named_ends", ()))
    likely = frozenset[int](getattr(tokenizer, "likely_ends", ()))
    if getattr(tokenizer, "chat_template", None):
        likely = (likely | tokens_after_answer(tokenizer)) - tokens_within_answer(tokenizer)
    return named | likely


def fingerprint(tokenizer: AnyTokenizer) -> str:
    """A hash of the vocabulary: equal for two tokenizers if and only if every id is the same token."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


def check_pair(target: AnyTokenizer, draft: AnyTokenizer) -> None:
    """Raises ModelError with the first difference between the tokenizers. Ignores padding after the vocabulary."""
    difference = first_difference(target, draft)
    if difference is not None:
        raise ModelError(
            f"The draft model cannot draft for this target: {difference}; choose one of the target's model family."
        )


def first_difference(target: AnyTokenizer, draft: AnyTokenizer) -> str | None:
    """A clause that names the first token or merge that differs; None if the tokenizers agree."""
    target_ids, draft_ids = ({id: token for token, id in tokenizer.get_vocab().items()} for tokenizer in (target, draft))
    for id in sorted(target_ids.keys() | draft_ids.keys()):
        if target_ids.get(id) != draft_ids.get(id):
            clauses = [f"is {ids[id]!r}" if id in ids else "does not exist" for ids in (target_ids, draft_ids)]
            return f"token {id} {clauses[0]} for the target and {clauses[1]} for the draft"
    for rank, (one, other) in enumerate(itertools.zip_longest(merges(target), merges(draft))):
        if one != other:
            return f"merge {rank} is {one!r} for the target and {other!r} for the draft"
    return None


def merges(tokenizer: AnyTokenizer) -> list[Any]:
    """The BPE merge rules in order; empty for other kinds of tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = json.loads(backend.to_str())["model"] if backend is not None else {}
    return list(model.get("merges") or [])
