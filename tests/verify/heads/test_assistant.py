"""Gemma 4's assistants: drafts are those of transformers' own module, and answers are lossless."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from outrider.drafters.none import NoDrafter
from outrider.verify.decode import decode
from outrider.verify.errors import ModelError
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.model.runner import ModelRunner
from outrider.verify.stream import DecodeOptions
from tests.slow import mostly_slow
from tests.verify.heads import sessions
from tests.verify.heads.checkpoints import randomised
from tests.verify.heads.sessions import check_answers, check_chain_at_once
from tests.verify.model.cpu.native.models import FAMILIES, SIZES, build

pytest.importorskip("transformers", "5.23")
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def assistant(family: str, make: Any) -> Any:
    """What `make` returns. A text configuration of 5.23 refuses what an assistant is: all layers read keys of others."""
    with pytest.MonkeyPatch.context() as patched:
        modes = property(lambda config: ["reuse"] * config.num_hidden_layers)
        patched.setattr(CONFIG_MAPPING[f"{family}_text"], "kv_sharing_modes", modes)
        return make()


def save(folder: Path, family: str = "gemma4", is_ordered: bool = False, **others: Any) -> Path:
    """Saves a small target, and an assistant of it, whose logits may be of the tokens of some centroids only."""
    build(f"{family}_text", num_kv_shared_layers=2).save_pretrained(folder / "target")
    text = {**SIZES, **FAMILIES[f"{family}_text"], "hidden_size": 48, "num_hidden_layers": 3, "layer_types": KINDS, **others}
    text |= {"model_type": f"{family}_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text |= {"use_double_wide_mlp": False, "enable_moe_block": False}
    text |= {"num_kv_shared_layers": 3, "final_logit_softcapping": None}
    own = {"num_centroids": 97, "centroid_intermediate_top_k": 9, "use_ordered_embeddings": is_ordered}
    torch.manual_seed(3)
    config = CONFIG_MAPPING[f"{family}_assistant"](text_config=text, backbone_hidden_size=SIZES["hidden_size"], **own)
    made = randomised(assistant(family, lambda: AutoModelForCausalLM.from_config(config)))
    for name, buffer in made.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
        if name.endswith("token_ordering"):
            buffer.copy_(torch.randperm(97))
    made.save_pretrained(folder / "assistant")  # type: ignore[operator]
    return folder


class Reference:
    """transformers' own modules."""

    def __init__(self, folder: Path, family: str) -> None:
        def load(name: str) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").eval()

        self.target, self.assistant = load("target"), assistant(family, lambda: load("assistant"))

    @torch.inference_mode()
    def drafts(self, text: list[int], depth: int) -> list[int]:
        """The greedy drafts after a text whose last token the target has not read."""
        ids = torch.tensor([text[:-1]])
        known = self.target(ids, output_hidden_states=True, return_shared_kv_states=True, use_cache=False)
        state, position, found = known.hidden_states[-1][:, -1:], torch.tensor([[len(text) - 1]]), text[-1:]
        for _ in range(depth):
            inputs = torch.cat([self.target.get_input_embeddings()(torch.tensor([found[-1:]])), state], -1)
            out = self.assistant(inputs_embeds=inputs, position_ids=position, shared_kv_states=known.shared_kv_states)
            state = out.last_hidden_state
            found.append(int(out.logits.argmax(-1)))
        return found[1:]


Known = tuple[ModelRunner, HeadModel, Reference]


@pytest.fixture(
    scope="module",
    params=[
        ("gemma4", "auto", False),
        ("gemma4", "torch", True),
        pytest.param(("gemma4_unified", "auto", True), marks=pytest.mark.slow),
    ],
    ids=["library", "torch, ordered", "unified, ordered"],
)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    family, backend, is_ordered = request.param
    folder = save(tmp_path_factory.mktemp("assistant"), family, is_ordered)
    return *sessions.load_started(folder / "target", folder / "assistant", backend=backend), Reference(folder, family)


def test_drafts_are_those_of_transformers_after_rejections_and_in_forks(known: Known) -> None:
    target, head, reference = known
    session = HeadRunner(head).session()
    verifier, text = sessions.begin(target, session), sessions.TEXT.tolist()
    chosen = decode(sessions.verifier_of(target), NoDrafter(), sessions.TEXT, DecodeOptions(sessions.GREEDY, 12)).tokens
    for count in (1, 2, 3):
        assert sessions.drafted(session, 4) == reference.drafts(text, 4)
        sessions.run_on(verifier, session, chosen[:count])
        text, chosen = [*text, *chosen[:count]], chosen[count:]
    forked, edited = verifier.clone(target.new_cache(), 9), [*text[:9], 50, 51, 52]
    copied = copy.deepcopy(session, {id(verifier.sequence): forked.sequence})
    sessions.begin(target, copied, edited, forked)
    assert sessions.drafted(copied, 3) == reference.drafts(edited, 3)
    assert sessions.drafted(session, 3) == reference.drafts(text, 3)


def test_a_chain_at_once_is_drafted_as_one_by_one(known: Known) -> None:
    target, head, _ = known
    session = HeadRunner(head).session()
    sessions.begin(target, session)
    check_chain_at_once(session)


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 0.8], 0.8))
def test_answers_equal_plain_decoding(known: Known, temperature: float) -> None:
    target, head, _ = known
    check_answers(target, HeadRunner(head), "draft-tree", temperature)


def test_keys_and_values_in_8_bits_change_drafts_little(tmp_path: Path) -> None:
    folder, found = save(tmp_path), []
    for kind in ("auto", "int8"):
        target, head = sessions.load_started(folder / "target", folder / "assistant", kv_dtype=kind)
        session = HeadRunner(head).session()
        sessions.begin(target, session)
        found.append(session.root(3))
    assert found[0].tokens[0, 0] == found[1].tokens[0, 0]
    assert found[0].probability[0, 0] == pytest.approx(found[1].probability[0, 0], abs=0.05)
    assert found[0].probability[0, 0] != found[1].probability[0, 0]


def test_an_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, head_dim=24)
    with pytest.raises(ModelError, match=r"does not fit this target; use the assistant of this target\."):
        sessions.load_started(folder / "target", folder / "assistant")
