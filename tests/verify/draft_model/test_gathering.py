"""Sessions that draft at the same time: one forward for all, an error for one alone, and the answers of each alone."""

import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, make
from outrider.verify.decode import finish
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.model.batch import Segment
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.round import RunDrafts, run_round
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier
from tests.verify.draft_model.test_draft_model import EAGER, PROMPT, close_relative, started


@pytest.fixture
def draft(tiny_runner: TorchRunner) -> DraftRunner:
    return DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary, slots=4)


@pytest.fixture
def sizes(draft: DraftRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    compute = draft.runner.forward_all

    def counted(segments: list[Segment]) -> list[torch.Tensor]:
        found.append(len(segments))
        return compute(segments)

    monkeypatch.setattr(draft.runner, "forward_all", counted)
    return found


def test_sessions_that_draft_together_share_forwards(draft: DraftRunner, sizes: list[int]) -> None:
    texts = [[3, 5, 7], [11, 13], [2, 4, 6, 8]]
    depths = [1, 3, 2]

    def chain(text: list[int], depth: int) -> list[int]:
        session, _ = started(draft, text)
        found = session.root(1)
        tokens = [int(found.tokens[0, 0])]
        for row in range(depth):
            tokens.append(int(session.expand([tokens[-1]], [row], 1).tokens[0, 0]))
        return tokens

    alone = [chain(text, depth) for text, depth in zip(texts, depths, strict=True)]
    sizes.clear()
    together: list[list[int]] = [[], [], []]
    work = [
        partial(lambda number, text, depth: together[number].extend(chain(text, depth)), number, text, depth)
        for number, (text, depth) in enumerate(zip(texts, depths, strict=True))
    ]
    draft.run_drafts(work)
    assert together == alone
    assert sizes == [3, 3, 2, 1]


def test_an_error_ends_the_work_of_one_session(draft: DraftRunner, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Token 1000 is outside the vocabulary, so that the forward of all three fails."""
    draft.ids.own = np.arange(1001, dtype=np.int32)
    found: dict[int, int | str] = {}

    def work(token: int) -> None:
        session = started(draft, [3, 5])[0]
        session.root(1)
        try:
            found[token] = len(session.expand([token], [0], 1).tokens)
        except IndexError as error:
            found[token] = type(error).__name__

    draft.run_drafts([partial(work, token) for token in (7, 1000, 9)])
    assert found == {7: 1, 1000: "IndexError", 9: 1}
    assert sizes[:2] == [3, 3]


def test_work_that_raises_does_not_stop_the_others(draft: DraftRunner) -> None:
    ended: list[int] = []

    def fails() -> None:
        raise torch.AcceleratorError("the device is lost")

    with pytest.raises(torch.AcceleratorError):
        draft.run_drafts([fails, lambda: ended.append(len(started(draft, [3])[0].root(2).tokens))])
    assert ended == [1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_streams_with_a_draft_model_get_the_answers_of_each_alone(
    draft: DraftRunner, sizes: list[int], tiny_runner: TorchRunner, temperature: float
) -> None:
    names: list[DrafterName] = ["draft", "draft-tree", "fusion", "pearl"]
    resources = Resources(EAGER, model=draft.session)

    def stream(number: int) -> Stream:
        options = DecodeOptions(SamplingParams(temperature=temperature, seed=number), 20, max_nodes=8)
        verifier = Verifier(tiny_runner, tiny_runner.new_cache())
        return Stream(verifier, make(names[number], resources), PROMPT[: 4 + number], options)

    alone = [finish(stream(number)).tokens for number in range(len(names))]
    sizes.clear()
    assert answers_in_rounds([stream(number) for number in range(len(names))], draft.run_drafts) == alone
    assert max(sizes) > 1


def test_one_thread_works_at_a_time(draft: DraftRunner) -> None:
    """What sessions share, such as the blocks of a datastore, is not thread-safe."""
    at_work, most = 0, 0

    def work() -> None:
        nonlocal at_work, most
        session = started(draft, [3, 5])[0]
        for _ in range(20):
            at_work += 1
            most = max(most, at_work)
            time.sleep(0)  # lets another thread work
            at_work -= 1
            session.root(1)

    draft.run_drafts([work] * 4)
    assert most == 1


def test_a_session_whose_cache_was_taken_reads_its_text_again(tiny_runner: TorchRunner) -> None:
    shared = DraftRunner(close_relative(tiny_runner, tiny_runner.model.config), tiny_runner.vocabulary, slots=1)
    first, text = started(shared, [3, 5, 7])
    token = int(first.root(1).tokens[0, 0])
    first.expand([token], [0], 1)
    started(shared, [11, 13])[0].root(1)
    text.append(np.array([token, 2], np.int32))
    first.advance(np.array([token, 2], np.int32))
    expected = started(DraftRunner(shared.runner, 97), [3, 5, 7, token, 2])[0].root(5).tokens
    assert first.root(5).tokens.tolist() == expected.tolist()


def answers_in_rounds(streams: Sequence[Stream], run_drafts: RunDrafts) -> list[list[int]]:
    """The tokens of all streams, each of which takes part in every round until it ends."""
    active, found = dict(enumerate(streams)), [list[int]() for _ in streams]
    while active:
        outcomes = run_round(list(active.values()), run_drafts=run_drafts)
        for number, outcome in zip(list(active), outcomes, strict=True):
            assert outcome is not None and not isinstance(outcome, Exception), outcome
            found[number] += outcome.tokens
            if outcome.finish:
                active.pop(number).close()
    return found
