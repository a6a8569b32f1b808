"""The tokenizer keeps a line break and its indentation together, and reproduces any text."""

from pathlib import Path

from outrider.verify.tokenizer import load_tokenizer
from training.corpus import SPECIAL_TOKENS
from training.tokenizer import train_tokenizer

TEXT = "def add(left, right):\n    return left + right\n\n\n"


def test_texts_round_trip_and_line_breaks_are_one_token(tmp_path: Path) -> None:
    train_tokenizer([TEXT] * 20, tmp_path, context_tokens=64)
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]
    for text in (TEXT, "naïve ☃\tx", "while True:\n    pass"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("\n    ", add_special_tokens=False)) == 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert chat == "<|user|>\nhi<|end|>\n<|assistant|>\n"
