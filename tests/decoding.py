"""Answers of sessions, for tests that compare drafted ones with plain decoding."""

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from outrider.drafters.interface import EMPTY, Drafter, DraftTree, Ints, Verdict
from outrider.drafters.none import NoDrafter
from outrider.verify.constraints.reasoning import Constraint
from outrider.verify.decode import Decoded, decode
from outrider.verify.model.runner import ModelRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions
from outrider.verify.verifier import Verifier
from tests.drafts import Chaos, Oracle


def answer_of(
    runner: ModelRunner, prompt: Ints, options: DecodeOptions, drafter: Drafter | None = None, grammar: Constraint | None = None
) -> Decoded:
    """The answer of a new session, by plain decoding unless there is a drafter."""
    return decode(Verifier(runner, runner.new_cache()), drafter or NoDrafter(), prompt, options, grammar)


def prefill(verifier: Verifier) -> None:
    """Reads the whole prompt."""
    while (chunk := verifier.chunk()) is not None:
        verifier.commit_chunk(chunk, verifier.runner.forward_all([chunk])[0])


def verify(verifier: Verifier, tree: DraftTree = EMPTY, feedback: int = 0) -> Verdict:
    """The verdict on a tree, after a forward of this step alone."""
    return verifier.judge(tree, verifier.runner.forward_all([verifier.segment(tree)])[0], feedback).verdict()


def check_sessions(
    runner: ModelRunner, seed: int, share: float, added: Sequence[int], tokens: int, reference: ModelRunner | None = None
) -> Iterator[Verifier]:
    """Checks sessions that go on, are forked, swapped and rewound at random points: drafted answers are those of new sessions.

    Each fork and each swap has the probability `share`; prompts add one of the numbers `added` of tokens. Yields the session of
    each request after its answer. New sessions are those of `reference`, if there is one.
    """
    random = Random(seed)
    sessions = [Verifier(runner, runner.new_cache()) for _ in range(3)]
    options = DecodeOptions(SamplingParams(0.8, seed=1), tokens)
    for step in range(6):
        session = sessions[number := random.randrange(3)]
        text = session.sequence.tokens
        kept = random.randrange(len(text) + 1)
        if random.random() < share and len(text) > 1:
            source = random.choice([each for each in sessions if each is not session])
            session = source.clone(runner.new_cache(), min(kept, len(source.sequence)))
            text = session.sequence.tokens
        if random.random() < share:
            session.swap_in(session.swap_out())
        more = random.choices(range(3, 97), k=random.choice(added))
        prompt: Ints = np.concatenate([text[:kept], np.array(more, np.int32)])[-3 * max(added) :]
        expected = answer_of(reference or runner, prompt, options).tokens
        drafter = Chaos(97, step) if step % 2 else Oracle(expected, 6, 4)
        assert decode(session, drafter, prompt, options).tokens == expected
        session.truncate(len(session.sequence) - random.randrange(3))  # as if a stop string had ended inside a block
        yield session
        sessions[number] = session
