"""Builds the tokenizer of a checkpoint from its tokenizer.json and the files beside it. Imports no transformers.

Promises the tokens, ids and chat templates of transformers' generic class for such files. The classes of some families, which
rebuild their tokenizers from the vocabulary alone, are not followed: the file is what the model was trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from outrider.verify.chat_template import DEFAULT
from outrider.verify.checkpoint import DEFAULT_REVISION, read_json
from outrider.verify.fast_tokenizer import FastTokenizer

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
    found = FastTokenizer(backend, special, read_templates(folder, config), [text_of(token) for token in others])
    found.response_template = config.get("response_template")
    return found


def listed(config: Mapping[str, Any], backend: Tokenizer) -> list[Any]:
    """The added tokens in the order of their ids: the configuration's list of them counts more than the tokenizer's own."""
    tokens = config.get("added_tokens_decoder") or backend.get_added_tokens_decoder()
    return [token for _, token in sorted(tokens.items(), key=lambda item: int(item[0]))]


def is_token(value: Any) -> bool:
    """Whether this is a token: a text, or an object with its text."""
    return isinstance(value, str) or (isinstance(value, Mapping) and "content" in value)


def text_of(token: Any) -> str:
    """The text of a token."""
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
