"""A running request: turns steps into TokenEvents."""

import numpy as np
from numpy.typing import NDArray

from outrider.drafters.interface import Drafter, Logprobs, Source
from outrider.drafters.prediction import PredictionDrafter
from outrider.drafters.sequence import Finish
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.fair_queue import LONG_PROMPT_TOKENS
from outrider.server.engine.messages import Request, StepReport, StepTrace, TokenEvent, TokenLogprobs
from outrider.server.settings import Settings
from outrider.server.worker.detokenizer import AnswerText, Detokenizer
from outrider.server.worker.runtime import Runtime
from outrider.server.worker.session import Session
from outrider.verify.constraints.reasoning import Constraint, ReasoningBudget
from outrider.verify.stream import DecodeOptions, Step, Stream

LABELS = {int(source): source.label for source in Source}


class Job:
    """A running request: one answer in one session's KV cache."""

    def __init__(self, request: Request, session: Session, runtime: Runtime, settings: Settings) -> None:
        self.id = request.id
        self.request = request
        self.session = session
        wanted = settings.speculation.max_nodes if request.max_nodes is None else request.max_nodes
        max_nodes, curve = runtime.budget(wanted)
        reader = runtime.runner.pictures
        name = request.drafter or settings.speculation.drafter
        resources = runtime.resources_of(request.principal, request.adapter)
        options = DecodeOptions(
            params=request.params,
            max_tokens=request.max_tokens,
            max_nodes=max_nodes,
            curve=curve,
            stop_ids=runtime.stop_ids.union(request.stop_token_ids),
            prediction=tuple(request.prediction),
            wants_prompt_logprobs=request.wants_prompt_logprobs,
            adapter=None if request.adapter is None else runtime.adapters[request.adapter],
            pictures=[reader.read(each.start, each.tokens, each.arrays) for each in request.pictures] if reader else [],
            corpora=runtime.with_corpus(resources, request.corpus),
        )
        works = runtime.has_library or name == "none"
        drafter: Drafter = session.drafter(name, resources) if works else PredictionDrafter()
        grammar = (
            None
            if request.grammar is None
            else runtime.grammars.compile(request.grammar, request.open_ended, request.principal)
        )
        constraint: Constraint | None = grammar
        if request.reasoning is not None:
            constraint = ReasoningBudget(request.reasoning, runtime.runner.vocabulary, grammar)
        self.stream = Stream(session.verifier, drafter, np.array(request.prompt, np.int32), options, constraint)
        self._text = AnswerText(
            detokenizer=make_detokenizer(request, runtime.tokens),
            stops=request.stop,
            keep_stop=request.keep_stop,
            min_tokens=request.params.min_tokens,
        )
        self._first_event = True

    @property
    def reads(self) -> bool:
        """Whether much of its prompt is unread, so that its answer does not begin soon."""
        return self.stream.verifier.unread_prompt > LONG_PROMPT_TOKENS

    def event(self, step: Step) -> TokenEvent | None:
        """The event of a step; None while the prompt is read."""
        if step.tree is None and step.finish is None:
            return None
        text, used, finish = self._read(step)
        tokens = step.tokens[:used]
        visible = min(used, len(step.tokens) - self._hides_end(step))
        logprobs = None if step.logprobs is None else token_logprobs(step.logprobs, visible)
        first, self._first_event = self._first_event, False
        prompt = self.stream.verifier.prompt_logprobs if first else None
        return TokenEvent(
            id=self.id,
            tokens=tokens,
            text=text,
            finish=finish,
            step=step_report(step, step_trace(step, tokens) if self.request.trace else None),
            cached_tokens=self.stream.reused_tokens,
            reuse=self.session.reuse if first else None,
            logprobs=logprobs,
            prompt_logprobs=None if prompt is None else token_logprobs(prompt, len(prompt.chosen)),
            stop_string=self._text.stop_string,
        )

    def _read(self, step: Step) -> tuple[str, int, Finish | None]:
        """The step's text, the number of tokens that it uses, and the finish reason if the answer ends."""
        finish = step.finish
        text, used = self._text.feed(step.tokens, self._hides_end(step))
        if self._text.stopped:
            self.stream.take_back(len(step.tokens) - used)
            return text, used, "stop"
        if finish is not None:
            text += self._text.finish()
            finish = "stop" if self._text.stopped else finish
        return text, used, finish

    def _hides_end(self, step: Step) -> bool:
        """Whether the last token is a stop token, whose text the request does not keep."""
        return step.finish == "stop" and not self.request.keep_stop


def make_detokenizer(request: Request, tokens: Vocabulary) -> Detokenizer:
    """A detokenizer for an answer that starts a text of its own, or continues the prompt's."""
    hidden = tokens.special_ids.difference(request.shown_tokens) if request.skip_special_tokens else ()
    return Detokenizer(tokens.bytes_of, hidden, tokens.drops_space(request.prompt, request.continues_prompt))


def token_logprobs(logprobs: Logprobs, count: int) -> TokenLogprobs:
    """The log-probabilities of the first `count` tokens, as a message."""
    return TokenLogprobs(
        chosen=logprobs.chosen[:count].tolist(), ids=logprobs.top_ids[:count].tolist(), values=logprobs.top[:count].tolist()
    )


def step_report(step: Step, trace: StepTrace | None = None) -> StepReport | None:
    """The step's times and counts; None if the target ran no step."""
    if step.tree is None:
        return None
    sources = step.tree.source
    return StepReport(
        draft_seconds=step.draft_seconds,
        verify_seconds=step.verify_seconds,
        commit_seconds=step.commit_seconds,
        drafted=count_sources(sources),
        accepted=count_sources(sources[step.path]),
        trace=trace,
    )


def step_trace(step: Step, tokens: list[int]) -> StepTrace | None:
    """The step's draft and what became of it; None if the target ran no step. `tokens` are those that the answer keeps."""
    tree, choice = step.tree, step.choice
    if tree is None or choice is None:
        return None
    accepted = step.path[: len(tokens)].tolist()
    return StepTrace(
        tokens=tree.tokens.tolist(),
        parents=tree.parents.tolist(),
        probability=tree.probability.tolist(),
        sources=[LABELS[source] for source in tree.source.tolist()],
        accepted=accepted,
        bonus=tokens[-1] if len(tokens) > len(accepted) else None,
        proposed=choice.proposed,
        expected=choice.expected,
        gain=choice.gain,
    )


def count_sources(sources: NDArray[np.uint8]) -> dict[str, int]:
    """The number of nodes (uint8 [N]) of each source, by label."""
    return {LABELS[i]: count for i, count in enumerate(np.bincount(sources).tolist()) if count}
