"""A program for test_helper: repeats messages, but loops at "loop"."""

from outrider.server.engine.helper import answer_all


def main(argument: str) -> None:
    answer_all(argument, repeat, 0)


def repeat(message: bytes) -> bytes:
    while message == b"loop":
        pass
    return message
