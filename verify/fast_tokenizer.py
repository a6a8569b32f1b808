"""A tokenizer of the library tokenizers, with what is used of transformers' interface. Imports no transformers."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from tokenizers import AddedToken, Tokenizer

from outrider.verify import chat_template

# A `FastTokenizer`, or a tokenizer of transformers.
AnyTokenizer: TypeAlias = Any


class FastTokenizer:
    """A tokenizer, its named special tokens, and its chat templates. Encoding changes its state, so each thread has its own."""

    clean_up_tokenization_spaces = False
    named_ends = likely_ends = frozenset[int]()  # as `outrider.verify.tokenizer.stop_ids` has them
    _others: tuple[str, ...] = ()

    def __init__(
        self,
        backend: Tokenizer,
        special: Mapping[str, str],
        templates: str | Mapping[str, str] | None = None,
        others: Sequence[str] = (),
    ) -> None:
        """`special` has tokens by transformers' names of their roles, such as `eos_token`; `others` are those without one."""
        self._others = tuple(others)
        self.backend_tokenizer, self.decoder, self.chat_template = backend, backend.decoder, templates
        self.special_tokens_map = special

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in text before it is split, by id."""
        found: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return found

    @property
    def all_special_tokens(self) -> list[str]:
        """The special tokens, first those with a role."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self._others]))

    @cached_property
    def _special_texts(self) -> frozenset[str]:
        """The added tokens that are marked as special."""
        return frozenset(token.content for token in self.added_tokens_decoder.values() if token.special)

    @property
    def all_special_ids(self) -> list[int]:
        return [id for id in map(self._id_of, self.all_special_tokens) if id is not None]

    def _id_of(self, token: str) -> int | None:
        found: int | None = self.backend_tokenizer.token_to_id(token)
        return found

    def _token_of(self, id: int) -> str | None:
        found: str | None = self.backend_tokenizer.id_to_token(id)
        return found

    def __getattr__(self, name: str) -> Any:
        """The token with a role, such as `eos_token`, or its id, such as `eos_token_id`; None if there is none."""
        role = name.removesuffix("_id")
        if not role.endswith("_token"):
            raise AttributeError(name)
        token = self.special_tokens_map.get(role)
        return self._id_of(token) if token is not None and role != name else token

    def get_vocab(self) -> Mapping[str, int]:
        found: dict[str, int] = self.backend_tokenizer.get_vocab()
        return found

    @property
    def longest_token(self) -> int:
        return max(map(len, self.get_vocab()), default=1)

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or those of several; None where there is none."""
        if isinstance(ids, Sequence):
            return [self._token_of(int(id)) for id in ids]
        return self._token_of(ids)

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False, **_: Any) -> list[int]:
        """The ids of a text; with `split_special_tokens`, special tokens are not recognised in it."""
        self.backend_tokenizer.encode_special_tokens = split_special_tokens
        found: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def __call__(self, texts: Sequence[str], add_special_tokens: bool = True, **_: Any) -> dict[str, list[list[int]]]:
        """The ids of several texts, as `input_ids`."""
        self.backend_tokenizer.encode_special_tokens = False
        found = self.backend_tokenizer.encode_batch(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [each.ids for each in found]}

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        given = [int(id) for id in ids] if isinstance(ids, Sequence) or hasattr(ids, "__iter__") else [int(ids)]
        return str(self.backend_tokenizer.decode(given, skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, tokenize: bool = True, **options: Any
    ) -> Any:
        """The text of a conversation, or its ids as `input_ids`."""
        assert self.chat_template is not None
        template = chat_template.chosen(self.chat_template, bool(tools))
        text = chat_template.render(template, messages, tools, **{**self.special_tokens_map, **options})
        return {"input_ids": self.encode(text, add_special_tokens=False)} if tokenize else text
