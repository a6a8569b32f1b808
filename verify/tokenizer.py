"""Loads tokenizers.

Of a checkpoint, the tokenizer.json and the files beside it are read, without transformers. They give the tokens, ids and chat
templates of transformers' generic class. The classes of some families, which rebuild tokenizers from the vocabulary alone,
are not followed: the file is what the model was trained with.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer

from outrider.verify.chat_template import DEFAULT
from outrider.verify.checkpoint import DEFAULT_REVISION, locate, read_json
from outrider.verify.errors import loading
from outrider.verify.fast_tokenizer import AnyTokenizer, FastTokenizer
from outrider.verify.gguf import llama_package
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.gguf.tokenizer import UnknownTokenizer, build_tokenizer
from outrider.verify.gguf.vocabulary import Vocabulary
from outrider.verify.hub import model_file, model_folder
from outrider.verify.packages import TRANSFORMERS, require
from outrider.verify.turns import tokens_after_answer, tokens_within_answer

TOKENIZER, CONFIG, SPECIAL, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
MORE_TEMPLATES, OLD_TEMPLATE = "additional_chat_templates", "chat_template.json"
FILES = (TOKENIZER, CONFIG, SPECIAL, TEMPLATE, f"{MORE_TEMPLATES}/*.jinja", OLD_TEMPLATE)
# The order of roles, which is that of tokens that the tokenizer has not yet.
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Names of lists of special tokens that have no role.
EXTRA = ("extra_special_tokens", "additional_special_tokens")


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


def has_own_code(folder: Path) -> bool:
    """Whether the model's files name a class of their own that reads its tokenizer."""
    named = read_json(str(folder), CONFIG, DEFAULT_REVISION).get("auto_map")
    return isinstance(named, list) or (isinstance(named, Mapping) and named.get("AutoTokenizer") is not None)


def read_tokenizer(folder: Path) -> FastTokenizer:
    """The tokenizer in a folder with a tokenizer.json. Raises what damaged files lead to."""
    config = read_json(str(folder), CONFIG, DEFAULT_REVISION)
    if "added_tokens_decoder" not in config:  # the file is older than this list, and has its tokens elsewhere
        config |= read_json(str(folder), SPECIAL, DEFAULT_REVISION)
    extra: Any = next((config[name] for name in EXTRA if config.get(name)), [])
    named = {role: token for role in [*ROLES, *config] if role.endswith("_token") and is_token(token := config.get(role))}
    named |= extra if isinstance(extra, Mapping) else {}
    others = [] if isinstance(extra, Mapping) else extra
    backend = Tokenizer.from_file(str(folder / TOKENIZER))
    backend.no_truncation()
    backend.no_padding()
    roles = {text_of(token) for token in named.values()}
    backend.add_tokens([added(token, text_of(token) in roles) for token in listed(config, backend)])
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {text_of(token): token for token in [*named.values(), *others] if text_of(token) not in known}
    backend.add_tokens([added(token, special=True) for token in missing.values()])
    special = {role: text_of(token) for role, token in named.items()}
    return FastTokenizer(backend, special, read_templates(folder, config), [text_of(token) for token in others])


def listed(config: Mapping[str, Any], backend: Tokenizer) -> list[Any]:
    """The added tokens in the order of their ids: the configuration's list of them counts more than the tokenizer's own."""
    tokens = config.get("added_tokens_decoder") or backend.get_added_tokens_decoder()
    return [token for _, token in sorted(tokens.items(), key=lambda item: int(item[0]))]


def is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def text_of(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else getattr(token, "content", token))


def added(token: Any, special: bool) -> AddedToken:
    """A token that is found in text before it is split; one with a role is `special`, whatever the files say."""
    if not isinstance(token, Mapping):
        token = token.__getstate__() if isinstance(token, AddedToken) else {"content": str(token)}
    fields = {name: value for name, value in token.items() if name not in ("__type", "special")}
    return AddedToken(**fields, special=special or bool(token.get("special")))


def read_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or several by name. Files of their own count more than the configuration."""
    files = {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    if (main := folder / TEMPLATE).is_file():
        files = {DEFAULT: main, **files}
    templates = {name: file.read_text("utf-8") for name, file in files.items()}
    if templates:
        return templates if [*templates] != [DEFAULT] else templates[DEFAULT]
    given = config.get("chat_template") or read_json(str(folder), OLD_TEMPLATE, DEFAULT_REVISION).get("chat_template")
    return {each["name"]: each["template"] for each in given} if isinstance(given, list) else given


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
