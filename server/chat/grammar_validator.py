"""The program that builds and validates grammars. It may die of any grammar: the front end replaces it.

llguidance compiles grammars recursively, so a deep grammar overflows the stack, which ends the whole process. This program
has a smaller stack than the worker and compiles a grammar in the same way, so the worker has room for what passes here.

Imports little, so that it starts quickly and stays small.
"""

import contextlib
import os
import threading

from llguidance import LLMatcher, LLTokenizer

from outrider.server.chat.grammar_builder import build
from outrider.server.chat.grammar_job import Built, decode_job, encode
from outrider.server.engine.helper import answer_all
from outrider.server.system import limit_memory, limit_processor_time, stack_limit
from outrider.verify.constraints.limits import LIMITS, first_line

BYTES = LLTokenizer("byte")
# A grammar may take this long. LIMITS keeps the slowest known grammars below 1 s.
CPU_SECONDS = 2.0
# This bounds the address space. The largest known grammars need an eighth of it.
MEMORY_BYTES = 1 << 30
# A chain of 650 rules fits.
MAX_STACK_BYTES = 2 << 20
# Grammars get one part in this many of the worker's stack, whose size is that of this process's main thread.
STACK_SHARE = 4


def main(argument: str) -> None:
    """Validates grammars from the socket until the front end closes it.

    Limits memory, and drops core dumps and panic messages, which contain text of clients.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError, ValueError):  # some systems have no such limit
        limit_memory(MEMORY_BYTES)
    threading.stack_size(stack_bytes())
    thread = threading.Thread(target=answer_all, args=(argument, answer))
    thread.start()
    thread.join()


def stack_bytes() -> int:
    """The size of the validating thread's stack."""
    limit = stack_limit()
    return MAX_STACK_BYTES if limit is None else min(MAX_STACK_BYTES, limit // STACK_SHARE)


def answer(message: bytes) -> bytes:
    """The answer to an encoded job, within the limit of processor time."""
    limit_processor_time(CPU_SECONDS)
    try:
        return encode(answer_to(message, BYTES))
    finally:
        limit_processor_time(0)


def answer_to(message: bytes, tokenizer: LLTokenizer) -> Built:
    """The grammar of an encoded job, or why there is none."""
    try:
        return build(decode_job(message), lambda grammar: reason(grammar, tokenizer))
    except RecursionError:
        why = "it is nested too deep; flatten it."
    except ValueError as error:
        why = str(error)
    return Built("", first_line(why), "invalid_grammar")


def reason(grammar: str, tokenizer: LLTokenizer) -> str:
    """Why the grammar is invalid or too expensive; empty if it is neither. `tokenizer` is the byte tokenizer."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():  # perhaps only because the grammar names tokens of the model's own tokenizer
        message = LLMatcher.validate_grammar(grammar, limits=LIMITS)
        return "" if message.startswith("WARNING") else first_line(message)
    matcher.compute_bitmask()
    matcher.consume_tokens(matcher.compute_ff_tokens())
    matcher.compute_bitmask()
    return first_line(matcher.get_error())
