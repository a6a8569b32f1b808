"""llama-cpp-python in this process: plain, with its prompt lookup, and with Outrider's drafts."""

from __future__ import annotations

import time
from contextlib import ExitStack

from bench.http.chat import Answer
from bench.live.setup import LivePeer, Question, Setup

PLAIN, LOOKUP, OUTRIDER = "plain", "lookup", "outrider"
PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}


class LlamaPython(LivePeer):
    """`Llama.generate` over the tokens of the rendered chat; the text of an answer is not kept for the next one."""

    name, methods = "llama-cpp-python", (PLAIN, LOOKUP, OUTRIDER)
    packages = PACKAGES

    def __init__(self, setup: Setup, stack: ExitStack) -> None:
        from bench.live.llama_model import LlamaPromptLookupDecoding, Model
        from outrider.engines.llama_cpp import DraftModel

        # The number of looked up tokens is the one that its documentation gives for CPUs.
        drafts = {PLAIN: None, LOOKUP: LlamaPromptLookupDecoding(num_pred_tokens=2), OUTRIDER: DraftModel()}
        self._new_drafts = DraftModel
        sizes = (setup.gguf_path, setup.context_tokens, setup.threads)
        self._models = {each: stack.enter_context(Model.opened(*sizes, drafts[each])) for each in self.methods}

    def answer(self, method: str, item: Question) -> Answer:
        model = self._models[method]
        if method == OUTRIDER:
            model.draft_model = self._new_drafts()  # nothing is learned from other answers
        model.begin()
        model.set_seed(item.seed)
        tokens: list[int] = []
        first = 0.0
        whole = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        started = time.perf_counter()
        for token in model.generate(item.ids.tolist(), temp=item.temperature, **whole):
            first = first or time.perf_counter() - started
            tokens.append(token)
            if token == model.token_eos() or len(tokens) == item.max_tokens:
                break
        seconds = time.perf_counter() - started
        return Answer(len(tokens), seconds, tokens, model.evaluations, first)
