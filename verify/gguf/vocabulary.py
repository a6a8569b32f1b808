"""The entries of a GGUF file that are about tokens."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken

from outrider.verify.gguf.texts import Texts, ids_of

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
TEMPLATE, DEFAULT = "tokenizer.chat_template", "default"
# A file names at most one token for the end of a text, of a turn and of a message each, and many files name one only, where
# generation_config.json lists several. The others have texts that published models use for nothing else.
END_ROLES = ("eos", "eot", "eom")
# The texts end texts, turns or messages of at least one family.
TEXTS = frozenset(
    [
        "<|endoftext|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end_of_text|>",
        "<|eot|>",
        "<|eom|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "<|end_of_turn|>",
        "<|endofturn|>",
        "[|endofturn|]",
        "<end_of_utterance>",
        "<|END_OF_TURN_TOKEN|>",
        "<EOS_TOKEN>",
        "<|observation|>",
        "<|role_end|>",
        "<|assistant_end|>",
        "<|end_of_sentence|>",
        "<end_of_sentence>",
        "<|end_of_msg|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001
        "<｜hy_eos:opensource｜>",  # noqa: RUF001
        "<|EOT|>",
        "<EOT>",
        "_<EOT>",
        "▁<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<|eos|>",
        "<|eod|>",
        "<seed:eos>",
        "<_end>",
    ]
)
# Elsewhere, this is a tag of HTML.
CONTROL_TEXTS = frozenset(["</s>"])
# Of these pairs, the first text ends answers where a vocabulary has the second one, too.
PAIRS = {"<|assistant|>": "<|end|>"}
# An answer has several messages where a vocabulary has one of these.
ANSWER_ENDS = frozenset(["<|return|>", "<|flush|>"])
MESSAGE_END = "<|end|>"


class Vocabulary:
    """The entries of a file that are about tokens."""

    def __init__(self, entries: Mapping[str, Any], path: str) -> None:
        self._entries = entries
        self.path = path
        self.kind = self.get("model")
        self.architecture = entries.get("general.architecture")
        self.tokens = Texts.of(self.get("tokens", []))
        self.types = np.array(self.get("token_type", [NORMAL] * len(self.tokens)), np.int32)
        self.ids = ids_of(self.tokens)

    def get(self, name: str, default: Any = None) -> Any:
        return self._entries.get(f"tokenizer.ggml.{name}", default)

    def ids_of(self, role: str) -> list[int]:
        """The tokens with a role such as `eos`: the one that the file names, or its list, without ids of no token."""
        given = [self.get(f"{role}_token_id"), self.get(f"{role}_token_ids")]
        ids = [id for each in given for id in (each if isinstance(each, list) else [each])]
        return [id for id in ids if isinstance(id, int) and 0 <= id < len(self.tokens)]

    def token(self, role: str) -> str | None:
        """The token with a role such as `eos`; None if the file names none."""
        return next((self.tokens[id] for id in self.ids_of(role)), None)

    @property
    def unknown(self) -> str | None:
        return self.token("unknown") or next((self.tokens[id] for id in np.flatnonzero(self.types == UNKNOWN).tolist()), None)

    @property
    def unused(self) -> list[str]:
        """The tokens that are marked as unused: converters pad vocabularies with them."""
        return [self.tokens[id] for id in np.flatnonzero(self.types == UNUSED).tolist()]

    @property
    def named_ends(self) -> frozenset[int]:
        """The tokens that the file says end a text, a turn or a message."""
        return frozenset(id for role in END_ROLES for id in self.ids_of(role))

    @property
    def likely_ends(self) -> frozenset[int]:
        """The tokens that end answers by their texts, unless the chat template writes them within an answer."""
        others = np.flatnonzero((self.types != NORMAL) & (self.types != BYTE)).tolist()
        special = {self.tokens[id]: id for id in others}
        found = special.keys() & TEXTS
        found |= {text for text in CONTROL_TEXTS if text in special and self.types[special[text]] == CONTROL}
        found |= {text for text, other in PAIRS.items() if text in special and other in special}
        if found & ANSWER_ENDS:
            found -= {MESSAGE_END, *PAIRS}
        return frozenset(special[text] for text in found)

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """The chat template, or several by name, of which the first is `default`; None if there is none."""
        main = self._entries.get(TEMPLATE)
        named = {
            key.removeprefix(f"{TEMPLATE}."): each for key, each in self._entries.items() if key.startswith(f"{TEMPLATE}.")
        }
        templates = ({} if main is None else {DEFAULT: main}) | named
        texts = {name: str(text) for name, text in templates.items()}
        return texts if len(texts) > 1 else next(iter(texts.values()), None)

    def ids_and_merges(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """The ids by token, and the pairs to merge, first the best: as listed, or else as the tokens' scores imply."""
        tokens = [*self.tokens]
        ids = {token: id for id, token in enumerate(tokens)}
        listed: Sequence[str] | None = self.get("merges")
        if listed is None:
            return ids, list(self._implied_merges(ids))
        pairs = (merge.partition(" ") for merge in listed)
        known = ((left, right) for left, _, right in pairs if left in ids and right in ids and left + right in ids)
        return ids, [(tokens[ids[left]], tokens[ids[right]]) for left, right in known]  # one object for each token

    def _implied_merges(self, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        scores = self.get("scores")
        tokens = [*self.tokens]
        known = {tokens[id] for id in np.flatnonzero(self.types == NORMAL)}
        order = np.lexsort((np.arange(len(scores)), -np.array(scores, np.float64)))  # of equal scores, the smaller id is first
        for id in order.tolist():
            token = tokens[id]
            if token not in known or ids[token] != id:
                continue
            for cut in range(1, len(token)):  # a vocabulary has millions of cuts, so this loop is a plain one
                if (left := token[:cut]) in known and (right := token[cut:]) in known:
                    yield left, right

    def added(self) -> list[AddedToken]:
        """The tokens that are found in text before it is split: control tokens, which are special, and the user's."""
        kinds = {CONTROL: True, USER_DEFINED: False}
        typed = {id: self.types[id] for id in np.flatnonzero(np.isin(self.types, [*kinds])).tolist()}
        return [AddedToken(self.tokens[id], normalized=False, special=kinds[kind]) for id, kind in typed.items()]


def text_ends(vocabulary: Vocabulary) -> tuple[list[str], list[str]]:
    """The tokens with which the file says that texts begin, and those with which they end."""
    is_sentencepiece = vocabulary.kind == "llama"
    ends = {"bos": vocabulary.get("add_bos_token", is_sentencepiece), "eos": vocabulary.get("add_eos_token", False)}
    before, after = ([token] if wanted and (token := vocabulary.token(role)) else [] for role, wanted in ends.items())
    return before, after
