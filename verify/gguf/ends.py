"""The tokens that end an answer, by a GGUF file's entries.

A file names at most one token for the end of a text, of a turn and of a message each, and many files name one only, where
generation_config.json lists several. The others have texts that published models use for nothing else. Knows nothing about
chat templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

ROLES = ("eos", "eot", "eom")
NORMAL, CONTROL, BYTE = 1, 3, 6
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


def ends_by_text(ids: Mapping[str, int], types: Sequence[int]) -> frozenset[int]:
    """The tokens whose texts end answers, in a vocabulary of ids by text and of types by id."""
    special = {text: id for text, id in ids.items() if types[id] not in (NORMAL, BYTE)}
    found = special.keys() & TEXTS
    found |= {text for text in CONTROL_TEXTS if text in special and types[special[text]] == CONTROL}
    found |= {text for text, other in PAIRS.items() if text in special and other in special}
    if found & ANSWER_ENDS:
        found -= {MESSAGE_END, *PAIRS}
    return frozenset(special[text] for text in found)
