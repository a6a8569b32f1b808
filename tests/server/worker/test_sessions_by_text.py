"""Sessions are found by their text; forks share the pages of their prefix, and change nothing for each other."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.interface import Ints
from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName, FusionOptions, LookupOptions, Options, TrigramOptions
from outrider.drafters.registry import Resources
from outrider.server.worker.session import Session, SessionKey
from outrider.server.worker.sessions import SessionStore
from outrider.verify.decode import decode, finish, step
from outrider.verify.model.cache import kv_cache
from outrider.verify.model.cache.kv_cache import distinct_rows
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling_params import SamplingParams
from outrider.verify.stream import DecodeOptions, Stream
from outrider.verify.verifier import Verifier
from tests.patches import patched

small_pages = patched(kv_cache, PAGE_TOKENS=16)  # that the tiny model's context holds several of


DRAFTERS: list[DrafterName] = ["trigram", "fusion", "lookup"]
SMALL = Resources(
    vocabulary=97,
    options=Options(
        trigram=TrigramOptions(contexts=64), fusion=FusionOptions(capacity=64, contexts=64), lookup=LookupOptions(capacity=64)
    ),
)


OPTIONS = DecodeOptions(SamplingParams(temperature=0), max_tokens=6)


def extend(text: Ints, *tokens: int) -> Ints:
    return np.concatenate([text, np.array(tokens, np.int32)])


class Automatic:
    """A store that finds sessions by their text."""

    def __init__(self, runner: TorchRunner, chunk: int = 0, **options: Any) -> None:
        self._runner, self._chunk = runner, chunk
        self.store = SessionStore(runner, **{"capacity": 4, "ttl_seconds": 60, "automatic": True, **options})

    def acquire(self, prompt: Ints, principal: str = "p", name: str | None = None) -> Session:
        session = self.store.acquire(principal, name, prompt)
        assert session is not None
        return session

    def answer(
        self, prompt: Ints, principal: str = "p", name: str | None = None, drafter: DrafterName = "trigram"
    ) -> tuple[str, int, Ints]:
        """How the session was found, the number of reused tokens, and the text with the answer, which must be the right one."""
        session = self.acquire(prompt, principal, name)
        stream = Stream(session.verifier, session.drafter(drafter, SMALL), prompt, OPTIONS)
        while self._chunk and (part := session.verifier.chunk(self._chunk)) is not None:
            session.verifier.commit_chunk(part, self._runner.forward_all([part])[0])
        tokens = finish(stream).tokens
        assert tokens == decode(Verifier(self._runner, self._runner.new_cache()), NoDrafter(), prompt, OPTIONS).tokens
        self.store.release(session)
        return session.reuse, stream.reused_tokens, extend(prompt, *tokens)


LONG = np.arange(64, dtype=np.int32) % 90


def test_a_conversation_continues_without_an_id(tiny_runner: TorchRunner) -> None:
    rig = Automatic(tiny_runner)
    reuse, reused, text = rig.answer(LONG)
    assert (reuse, reused) == ("new", 0)
    for _ in range(3):
        prompt = extend(text, 7, 8)
        reuse, reused, text = rig.answer(prompt)
        assert reuse == "continued" and reused >= len(prompt) - 3
    assert len(rig.store) == 1
    assert rig.answer(extend(text, 1), principal="another")[:2] == ("new", 0)


def test_a_prompt_that_leaves_the_text_early_forks_it(tiny_runner: TorchRunner) -> None:
    """A shared beginning, an edited turn and a repeated prompt leave the first conversation as it is."""
    rig = Automatic(tiny_runner)
    _, _, text = rig.answer(LONG)
    assert rig.answer(extend(LONG[:40], 5, 5, 5))[:2] == ("forked", 40)
    assert rig.answer(LONG)[:2] == ("forked", len(LONG) - 1)
    assert rig.answer(LONG, name="with an id")[0] == "forked"
    reuse, reused, _ = rig.answer(extend(text, 9))
    assert reuse == "continued" and reused >= len(text) - 1


def test_requests_that_share_a_beginning_read_it_once(tiny_runner: TorchRunner) -> None:
    rig = Automatic(tiny_runner, slots=3)
    first = rig.acquire(LONG)
    stream = Stream(first.verifier, NoDrafter(), LONG, OPTIONS)
    assert rig.store.acquire("p", None, extend(LONG[:50], 1)) is None  # the first request has not read it yet
    assert rig.store.acquire("p", None, np.full(64, 5, np.int32)) is not None  # another text does not wait
    step(stream)
    second = rig.acquire(extend(LONG[:50], 1))
    assert second.reuse == "forked" and second.verifier.committed_rows == 50
    finish(stream)
    rig.store.release(first)
    assert first.verifier.committed_rows >= len(LONG)


def test_a_fork_of_a_swapped_out_session_and_of_its_drafters(tiny_runner: TorchRunner) -> None:
    rig = Automatic(tiny_runner, slots=1)
    rig.answer(LONG)
    other = rig.acquire(np.full(64, 5, np.int32))  # takes the only slot
    rig.store.release(other)
    reuse, reused, _ = rig.answer(extend(LONG[:50], 3, 3))
    assert (reuse, reused) == ("forked", 50)
    [source, fork] = [session for session in rig.store._sessions.values() if "trigram" in session.drafters]
    assert source.drafters["trigram"] is not fork.drafters["trigram"]
    assert source.verifier.sequence is not fork.verifier.sequence


def test_sub_agents_count_their_prefix_once(tiny_config: LlamaConfig) -> None:
    """Four conversations that share 6,000 tokens fit where one of them fits, and each goes on."""
    config = copy.deepcopy(tiny_config)
    config.max_position_embeddings = 8192
    runner = TorchRunner(LlamaForCausalLM(config))
    prefix, bound = np.arange(6000, dtype=np.int32) % 90, runner.cache_shape.bytes_for(6500)
    store = SessionStore(runner, capacity=9, ttl_seconds=60, slots=2, automatic=True, kv_bytes=bound)
    texts = [extend(prefix, *[number] * 64) for number in range(4)]
    for turn in range(2):
        for number, text in enumerate(texts):
            session = store.acquire("p", None, text)
            assert session is not None
            assert session.verifier.committed_rows >= (6000 if turn or number else 0)
            assert session.reuse == ("continued" if turn else "forked" if number else "new")
            decode(session.verifier, NoDrafter(), text, OPTIONS)
            store.release(session)
            texts[number] = extend(session.verifier.sequence.tokens, 1, 2)
    assert len(store) == 4
    swapped = [session.verifier.rows for session in store._sessions.values()]
    assert 6000 <= distinct_rows(swapped) <= 6000 + 4 * (64 + 2 * 8 + kv_cache.PAGE_TOKENS)


def test_the_principal_with_the_most_bytes_gives_way(tiny_runner: TorchRunner) -> None:
    """A long session of one principal does not evict the short ones of another, though they are more."""
    rig = Automatic(tiny_runner, capacity=10, kv_bytes=tiny_runner.cache_shape.bytes_for(250))
    for token in (1, 2, 3):
        rig.answer(np.full(32, token, np.int32), "short")
    for token in (4, 5, 6):
        rig.answer(np.full(70, token, np.int32), "long")
    assert [name for name, _ in rig.store._sessions] == ["short", "short", "short", "long"]


OTHER = np.full(64, 5, np.int32)


def test_a_name_hides_nothing_that_is_cached(tiny_runner: TorchRunner) -> None:
    """A client names its title request and its chat alike, and its next conversation otherwise."""
    rig = Automatic(tiny_runner, slots=3)
    title, chat = rig.acquire(OTHER, name="s"), rig.acquire(LONG, name="s")  # neither waits for the other
    streams = [Stream(each.verifier, NoDrafter(), text, OPTIONS) for each, text in ((title, OTHER), (chat, LONG))]
    for each, stream in zip((title, chat), streams, strict=True):
        finish(stream)
        rig.store.release(each)
    assert len(rig.store) == 2 and chat.key == SessionKey("p", "s")
    assert rig.answer(extend(chat.text.tokens, 3), name="s")[:2] == ("continued", len(LONG) + 5)
    assert rig.answer(extend(LONG[:50], 1), name="next")[:2] == ("forked", 50)
    assert rig.answer(extend(OTHER, 1), name="s")[:2] == ("continued", len(OTHER))  # the title's text is still there
    text = chat.text.tokens.copy()
    assert rig.answer(extend(text, 3), name="s")[:2] == ("continued", len(text) - 1)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=25)
def test_answers_do_not_depend_on_reuse(tiny_runner: TorchRunner, data: st.DataObject) -> None:
    """Random edits, forks, repeats and continuations: every answer is that of a fresh session (checked by `answer`)."""
    rig = Automatic(tiny_runner, slots=2, capacity=3)
    texts = [LONG]
    for _ in range(8):
        text = texts[data.draw(st.integers(0, len(texts) - 1))]
        cut = data.draw(st.integers(1, len(text)))
        prompt = extend(text[:cut], *data.draw(st.lists(st.integers(0, 90), max_size=6)))[:100]
        principal, drafter = data.draw(st.sampled_from("pq")), data.draw(st.sampled_from(DRAFTERS))
        _, reused, text = rig.answer(prompt, principal, data.draw(st.sampled_from(["a", "b", None])), drafter)
        assert reused < len(prompt) and np.array_equal(text[: len(prompt)], prompt)
        texts.append(text)


@given(st.data())
@settings(max_examples=8, deadline=None)
def test_a_name_is_never_worse_than_none(tiny_runner: TorchRunner, data: st.DataObject) -> None:
    """Turns of conversations that begin alike, under any names: each reuses what its last turn left, as without names."""
    named, unnamed = (Automatic(tiny_runner, capacity=20, slots=2) for _ in range(2))
    texts = [extend(LONG[:40], *[token] * 4) for token in range(3)]
    for _ in range(data.draw(st.integers(1, 8))):
        number = data.draw(st.integers(0, 2))
        name = data.draw(st.sampled_from(["a", "b", None]))
        _, reused, text = named.answer(texts[number], name=name)
        assert reused >= unnamed.answer(texts[number])[1]
        if len(text) < 100:
            texts[number] = extend(text, 1, number)
