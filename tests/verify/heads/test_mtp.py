"""MTP layers of checkpoints and GGUF files: drafts are those of transformers' own modules, and answers are lossless."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from outrider.drafters.none import NoDrafter
from outrider.drafters.options import DrafterName
from outrider.verify.checkpoint import MTP
from outrider.verify.decode import decode
from outrider.verify.errors import ModelError
from outrider.verify.heads.chain import ChainedHeads
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.model.architecture.families import FAMILIES as KNOWN
from outrider.verify.model.cpu.native.library import compiled_library
from outrider.verify.model.runner import ModelRunner
from outrider.verify.stream import DecodeOptions
from tests.slow import mostly_slow
from tests.verify.heads import sessions
from tests.verify.heads.sessions import check_answers, check_chain_at_once
from tests.verify.model.cpu.native.files import write_gguf
from tests.verify.model.cpu.native.models import FAMILIES, SIZES, build

pytest.importorskip("transformers", "5.23")
LAYERS = SIZES["num_hidden_layers"]
SURROUNDING = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
IN_FILES = ("glm4_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


def save(folder: Path, family: str, count: int) -> Path:
    """Saves a random model as a checkpoint, model.gguf with it: its last `count` layers are the blocks of MTP layers."""
    kinds = FAMILIES[family].get("layer_types")
    kinds = kinds and [*kinds[:-1], "full_attention"]  # as in the published ones
    types: dict[str, Any] = {} if kinds is None else {"layer_types": [*kinds, *["full_attention"] * count]}
    whole: Any = build(family, num_hidden_layers=LAYERS + count, **types)
    size, less = whole.config.hidden_size, float(KNOWN[family].norms_less_one)
    torch.manual_seed(7)
    around = {f"{LAYERS + at}.{name}": torch.randn(size) * 0.2 for at in range(count) for name in SURROUNDING}
    around |= {name: torch.randn(size, 2 * size) * 0.1 for name in around if name.endswith("eh_proj")}
    if KNOWN[family].name in ("glm4moe", "qwen35", "qwen35moe", "qwen3next"):
        entries = {"tokenizer.ggml.model": "no_vocab", f"{KNOWN[family].name}.nextn_predict_layers": count}
        named = {
            f"blk.{name.replace('.', '.nextn.', 1).replace('head.norm', 'head_norm')}.weight": each
            for name, each in around.items()
        }
        others = {name: (each + (less if each.ndim == 1 else 0)).numpy() for name, each in named.items()}
        write_gguf(whole, folder / "model.gguf", tokenizer=entries, others=others)
    whole.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors") | {f"model.layers.{name}.weight": each for name, each in around.items()}
    if kinds is not None:  # Qwen
        for name in [each for each in weights if each.startswith(f"model.layers.{LAYERS}.")]:
            rest = name.split(".", 3)[3]
            own = SURROUNDING.get(rest.removesuffix(".weight"))
            weights[f"mtp.layers.0.{rest}" if own is None else f"mtp.{own}.weight"] = weights.pop(name)
        whole.config.layer_types, whole.config.mtp_num_hidden_layers = kinds, count
    whole.config.num_hidden_layers = LAYERS
    whole.config.num_nextn_predict_layers = count
    whole.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Reference:
    """transformers' own model and MTP layers of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from transformers.modeling_layers import MtpModel

        main: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        config = main.config
        config.num_mtp_layers = getattr(config, "mtp_num_hidden_layers", None) or config.num_mtp_layers
        config.mtp_layer_types = ["full_attention"] * config.num_mtp_layers
        main._keys_to_ignore_on_load_unexpected = [
            "^mtp",
            *(rf"layers\.{LAYERS + at}\." for at in range(config.num_mtp_layers)),
        ]
        self.main, self.mtp = main, MtpModel.from_pretrained(main).eval()

    @torch.inference_mode()
    def drafts(self, text: list[int], depth: int) -> list[int]:
        """The greedy drafts after a text, of whose last token there is no state. The last layer goes on with its own states."""
        from transformers.cache_utils import MtpCache

        cache, last = MtpCache(config=self.main.config.get_mtp_config()), len(self.mtp.layers) - 1
        states = self.main.model(torch.tensor([text[:-1]])).last_hidden_state
        ids, positions = torch.tensor([text[1:]]), torch.arange(1, len(text))[None]
        expected, _, _ = self.mtp(ids, states, None, positions, MtpCache(config=self.main.config.get_mtp_config()))
        found: list[int] = []
        for number in range(depth):
            if number > last:
                ids, positions, states = ids[:, -1:], positions[:, -1:], states[:, -1:]
            states = self.mtp.forward_layer(min(number, last), states, positions, cache, input_ids=ids)
            token = self.mtp._project_to_logits(states[:, -1:]).argmax(-1)
            found.append(int(token))
            ids, positions = torch.cat([ids[:, 1:], token], 1), torch.cat([positions[:, 1:], positions[:, -1:] + 1], 1)
        assert found[: last + 1] == expected[0].tolist()[:depth]
        return found


@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
@pytest.mark.parametrize("family", mostly_slow([*IN_FILES, "deepseek_v3", "glm4_moe of 3"], "deepseek_v3", "glm4_moe of 3"))
def test_drafts_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    name, _, count = family.partition(" of ")
    folder = save(tmp_path, name, int(count or 1))
    expected = Reference(folder).drafts(sessions.TEXT.tolist(), 5)
    for path in (folder, folder / "model.gguf"):
        if path.exists():
            target, head = sessions.load_started(path, MTP)
            session = HeadRunner(head).session()
            sessions.begin(target, session, sessions.TEXT)
            assert sessions.drafted(session, 5) == expected, path.name


@pytest.fixture(scope="module", params=mostly_slow(["auto", "torch"], "auto"))
def several(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, HeadModel, Reference]:
    """Three layers, whose own states of few positions are kept."""
    folder = save(tmp_path_factory.mktemp("several"), "deepseek_v3", 3)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChainedHeads, "own_positions", 48)
        return *sessions.load_started(folder, MTP, backend=request.param), Reference(folder)


def test_caches_follow_rejections_truncation_and_forks(several: tuple[ModelRunner, HeadModel, Reference]) -> None:
    target, head, reference = several
    session = HeadRunner(head).session()
    verifier = sessions.begin(target, session, sessions.TEXT)
    text = sessions.TEXT.tolist()
    session.root(2)
    session.expand([5, 6], [0, 0], 1)
    session.expand([7], [2], 1)  # below the second one
    session.expand([8], [1], 1)
    chosen = decode(sessions.verifier_of(target), NoDrafter(), sessions.TEXT, DecodeOptions(sessions.GREEDY, 40)).tokens
    for step in range(12):
        drafts = sessions.drafted(session, 4)
        assert drafts == reference.drafts(text, 4)
        emitted = chosen[: step % 3 + 1] if drafts[0] != chosen[0] else chosen[:2]
        sessions.run_on(verifier, session, emitted)  # drafts that are right are committed, and others rejected
        text, chosen = [*text, *emitted], chosen[len(emitted) :]
    forked = verifier.clone(target.new_cache(), 30)
    copied = copy.deepcopy(session, {id(verifier.sequence): forked.sequence})
    for each, cut, own in ((session, 9, verifier), (copied, 30, forked)):  # the own states before are not kept
        edited = [*text[:cut], 50, 51, 52]
        sessions.begin(target, each, edited, own)
        assert sessions.drafted(each, 4) == reference.drafts(edited, 4)


@pytest.mark.parametrize(
    ("name", "temperature"),
    mostly_slow(
        [("draft", 0.8), ("draft-tree", 0.0), ("draft-tree", 0.8), ("pearl", 0.0)], ("draft-tree", 0.8), ("pearl", 0.0)
    ),
)
def test_answers_equal_plain_decoding(
    several: tuple[ModelRunner, HeadModel, Reference], name: DrafterName, temperature: float
) -> None:
    target, head, _ = several
    check_answers(target, HeadRunner(head), name, temperature)


def test_a_chain_at_once_is_drafted_as_one_by_one(several: tuple[ModelRunner, HeadModel, Reference]) -> None:
    target, head, _ = several
    session = HeadRunner(head).session()
    sessions.begin(target, session)
    check_chain_at_once(session, 6)


@pytest.mark.skipif(compiled_library() is None, reason="the library was not compiled")
def test_files_without_layers_are_refused(tmp_path: Path) -> None:
    plain = write_gguf(build("glm4_moe"), tmp_path / "plain.gguf")
    with pytest.raises(ModelError, match=r"plain\.gguf' has no multi-token prediction layer: only some converters keep it"):
        sessions.load_started(plain, MTP)
