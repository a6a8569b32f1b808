"""Renders a model's chat templates once in a process with limits, before any other process renders them.

A template is a program from the model's files, which may loop, or write more than the memory holds. Promises that such a model
is refused with one sentence. Knows nothing about what is rendered; a template that fails in other ways is served as ever.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from outrider.server.chat.template.abilities import Message, probe
from outrider.server.engine.helper import BlockingHelper, HelperEnded, answer_all
from outrider.server.system import limit_memory, limit_processor_time
from outrider.verify import chat_template
from outrider.verify.errors import ModelError

if TYPE_CHECKING:
    from outrider.server.settings import Settings
    from outrider.verify.fast_tokenizer import AnyTokenizer

# All renderings of `probe` take milliseconds and a few megabytes.
CPU_SECONDS = 2.0
MEMORY_BYTES = 1 << 30
# A process that makes no progress gets this time.
ANSWER_SECONDS = 60.0


def load_tried_tokenizer(settings: Settings) -> AnyTokenizer:
    """The tokenizer of the model, whose chat templates can be rendered. Raises ModelError.

    Templates that have passed are named in the folder of findings, and not tried again.
    """
    from outrider.verify.findings import save_finding
    from outrider.verify.tokenizer import load_tokenizer  # the program does without transformers

    model, folder = settings.model, settings.speculation.cost_folder
    tokenizer = load_tokenizer(model.path, model.trust_remote_code, model.revision)
    given: Any = getattr(tokenizer, "chat_template", None)
    texts = list(given.values()) if isinstance(given, dict) else [given]
    variables = {name: str(value) for name, value in tokenizer.special_tokens_map.items()}
    trial = json.dumps([[text for text in texts if isinstance(text, str)], variables])
    passed = folder and folder.expanduser() / f"template-{hashlib.sha256(trial.encode()).hexdigest()}.json"
    if passed is not None and passed.is_file():
        return tokenizer
    if not ends(trial):
        raise ModelError(
            f"The chat template of the model at {model.path!r} takes more than {CPU_SECONDS:g} s or {MEMORY_BYTES >> 20} MiB"
            " for a short conversation; serve another model, or mend its template."
        )
    save_finding({}, passed)
    return tokenizer


@lru_cache(16)
def ends(trial: str) -> bool:
    """Whether rendering templates with variables, both as JSON, ends within the limits. Raises OSError without a process."""
    with closing(BlockingHelper(__name__)) as program, contextlib.suppress(HelperEnded):
        return bool(program.ask(trial.encode(), ANSWER_SECONDS))
    return False


def main(argument: str) -> None:
    """Renders the templates from the socket, and answers when that has ended."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    with contextlib.suppress(OSError, ValueError):  # some systems have no such limit
        limit_memory(MEMORY_BYTES)
    limit_processor_time(CPU_SECONDS)
    answer_all(argument, answer)


def answer(message: bytes) -> bytes:
    texts, variables = json.loads(message)
    for text in texts:
        render_probes(text, variables)
    return b"."


def render_probes(text: str, variables: Mapping[str, Any]) -> None:
    """Renders the server's own conversations. Raises MemoryError."""

    def render(messages: list[Message], tools: Sequence[dict[str, Any]] = ()) -> str:
        try:
            return chat_template.render(text, messages, list(tools), add_generation_prompt=True, **variables)
        except MemoryError:
            raise
        except Exception:  # what a template raises is told to the requests that it fails
            return ""

    probe(render)
