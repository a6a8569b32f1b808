"""The tokenizer of a GGUF file by llama.cpp, for those that `outrider.verify.gguf.tokenizer` does not build."""

import ctypes
from typing import Any

from transformers import PreTrainedTokenizer

from outrider.verify.errors import ModelError
from outrider.verify.gguf import llama_package
from outrider.verify.gguf.tokenizer import ROLES
from outrider.verify.gguf.vocabulary import Vocabulary


class LlamaTokenizer(PreTrainedTokenizer):  # type: ignore[misc]
    """A tokenizer of transformers' interface whose ids are llama.cpp's. Its tokens are bytes: some are parts of characters."""

    def __init__(self, file: str, vocabulary: Vocabulary) -> None:
        """Reads the vocabulary alone. Raises ModelError."""
        self._api = llama_package.library()
        llama_package.ERRORS.clear()
        parameters = self._api.llama_model_default_params()
        parameters.vocab_only = True
        self._model = self._api.llama_model_load_from_file(file.encode(), parameters)
        if not self._model:
            raise ModelError(
                f"llama.cpp cannot read the tokenizer of {vocabulary.path!r} ({llama_package.last_error()}); serve the model's"
                " folder in transformers' format."
            )
        self._handle = self._api.llama_model_get_vocab(self._model)
        self._ids = vocabulary.ids
        self.named_ends, self.likely_ends = vocabulary.named_ends, vocabulary.likely_ends
        self.token_bytes = [self._bytes_of(id) for id in range(len(vocabulary.tokens))]
        adds = {"bos": self._api.llama_vocab_get_add_bos, "eos": self._api.llama_vocab_get_add_eos}
        wanted = {role: vocabulary.token(role) for role, adds_token in adds.items() if adds_token(self._handle)}
        self._before, self._after = ([self._ids[token]] if (token := wanted.get(role)) else [] for role in ("bos", "eos"))
        super().__init__(
            added_tokens_decoder={self._ids[token.content]: token for token in vocabulary.added()},
            chat_template=vocabulary.chat_template,
            clean_up_tokenization_spaces=False,
            **{name: token for name, role in ROLES.items() if (token := vocabulary.token(role)) is not None},
        )

    def __del__(self) -> None:
        if model := getattr(self, "_model", None):
            self._api.llama_model_free(model)

    def _bytes_of(self, id: int) -> bytes:
        size = 64
        while True:
            text = ctypes.create_string_buffer(size)
            length = self._api.llama_token_to_piece(self._handle, id, text, size, 0, True)
            if length >= 0:
                return text.raw[:length]
            size = -length

    @property
    def vocab_size(self) -> int:
        """The number of the file's tokens."""
        return len(self.token_bytes)

    def get_vocab(self) -> dict[str, int]:
        """The ids by the tokens' names in the file."""
        return dict(self._ids)

    def _tokenize(self, text: str, **_: Any) -> list[int]:
        """The ids of a text in which no special token is recognised; for the base class, they are tokens."""
        data, size = text.encode(), len(text) + 16
        while True:
            found = (ctypes.c_int32 * size)()
            count = self._api.llama_tokenize(self._handle, data, len(data), found, size, False, False)
            if count >= 0:
                return list(found[:count])
            size = -count

    def _convert_token_to_id(self, token: int | str) -> int | None:
        return token if isinstance(token, int) else self._ids.get(token)

    def _convert_id_to_token(self, index: int) -> bytes | None:
        return self.token_bytes[index] if 0 <= index < len(self.token_bytes) else None

    def convert_tokens_to_string(self, tokens: list[Any]) -> str:
        """The text of tokens, of which added ones are text already."""
        parts = (token.encode() if isinstance(token, str) else token for token in tokens if token is not None)
        return b"".join(parts).decode("utf-8", "replace")

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        """The tokens with which the file says that texts begin and end, around one text or two."""
        parts = [token_ids_0] if token_ids_1 is None else [token_ids_0, token_ids_1]
        return [id for part in parts for id in (*self._before, *part, *self._after)]

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        """Nothing: the GGUF file has the vocabulary."""
        return ()
