"""The server's worker with forced replay: real forwards, whose tokens are those of a recorded answer."""

from __future__ import annotations

from typing import Any

import numpy as np

import outrider.server.worker.main
from bench.model.streams import Recorded
from outrider.drafters.interface import Ints
from outrider.server.settings import Settings
from outrider.server.worker import runtime
from outrider.server.worker.runtime import Runtime
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.verifier import Verifier
from tests.agents.script import recorded_answer


def main(file_descriptor: str) -> None:
    """As `outrider.server.worker.main.main`; the replay begins once the model is loaded."""
    load = runtime.load

    def load_and_replay(settings: Settings) -> Runtime:
        loaded = load(settings)
        replay(loaded.tokenizer)
        return loaded

    runtime.load = load_and_replay
    outrider.server.worker.main.main(file_descriptor)


def replay(tokenizer: AnyTokenizer) -> None:
    """From now on, every request of this process is answered with `recorded_answer`."""
    begin = Verifier.begin

    def begin_recorded(verifier: Verifier, prompt: Ints, *arguments: Any, **options: Any) -> int:
        reused = begin(verifier, prompt, *arguments, **options)
        answer = tokenizer.encode(recorded_answer(str(tokenizer.decode(prompt))), add_special_tokens=False)
        verifier._rule = Recorded(np.array(answer, np.int32))
        return reused

    Verifier.begin = begin_recorded  # type: ignore[method-assign, assignment]
