"""llama-cpp-python with drafts: greedy answers are those of the model alone, and nothing is read twice."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from llama_cpp import Llama, llama_cpp

from outrider import models
from outrider.drafters.library import Session
from outrider.engines.llama_cpp import DraftModel
from outrider.verify.model.cpu.native.variants import processor_flags
from tests.gguf_folders import write_folder

PROMPT = b"def add(a, b):\n    return a + b\n\n\ndef add_three(a, b, c):\n"


class Counted(DraftModel):
    """Notes the tokens that each call reads, and the tokens that it drafts."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.read: list[int] = []
        self.drafted = 0

    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        known = len(self.session.tokens)
        draft = super().__call__(input_ids, **kwargs)
        self.read.append(len(input_ids) - known)
        self.drafted += len(draft)
        return draft


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model in 32 bits, in which a batch of rows has the same argmax as each row alone."""
    path = tmp_path_factory.mktemp("llama") / "model.gguf"
    write_folder(Path(models.TARGET), path)
    return path


@pytest.fixture
def opened(file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if "amx_tile" in processor_flags():  # llama.cpp's kernels for AMX crash
        defaults = llama_cpp.llama_model_default_params

        def without_extra_buffers() -> Any:
            parameters = defaults()
            parameters.use_extra_bufts = False
            return parameters

        monkeypatch.setattr(llama_cpp, "llama_model_default_params", without_extra_buffers)
    loaded: list[Llama] = []

    def load(draft_model: Any = None) -> Llama:
        loaded.append(Llama(str(file), n_ctx=512, n_threads=1, verbose=False, draft_model=draft_model, logits_all=True))
        return loaded[-1]

    yield load
    for each in loaded:
        each.close()


def answer(model: Llama, prompt: bytes = PROMPT, count: int = 80) -> list[int]:
    tokens = []
    for token in model.generate(model.tokenize(prompt), temp=0.0):
        tokens.append(token)
        if len(tokens) == count:
            return tokens
    return tokens


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("drafter", ["fusion", "trigram", "lookup"])
def test_greedy_answers_are_those_of_the_model_alone(opened: Any, drafter: str) -> None:
    drafts = Counted(drafter=drafter)
    assert answer(opened(drafts)) == answer(opened())
    assert drafts.drafted and len(drafts.read) < 80, "some tokens are accepted"


@pytest.mark.filterwarnings("ignore")
def test_nothing_is_read_twice_and_a_session_goes_on(opened: Any) -> None:
    drafts = Counted()
    model = opened(drafts)
    first = answer(model)
    assert all(0 < new <= 9 for new in drafts.read[1:])
    calls = len(drafts.read)
    answer(opened(again := Counted(session=Session("fusion", state=drafts.session.state()))))
    assert len(again.read) < calls
    assert first
