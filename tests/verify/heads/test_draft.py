"""Draft heads: what is loaded, candidates from the target's states, caches that follow sessions, and lossless answers."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn.functional import scaled_dot_product_attention, silu

from outrider import models
from outrider.drafters.options import DrafterName
from outrider.drafters.registry import Resources, clone, make
from outrider.verify.checkpoint import MTP
from outrider.verify.decode import decode
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.errors import ModelError
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadModel, HeadRunner
from outrider.verify.heads.networks import Eagle3Head, EagleHead, MtpHead
from outrider.verify.model.attention.torch_attention import TorchAttention
from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.load_options import Backend, LoadOptions, Quantize
from outrider.verify.model.runner import ModelRunner
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.stream import DecodeOptions
from outrider.verify.tokenizer import load_tokenizer
from outrider.verify.verifier import Verifier
from tests.decoding import answer_of, prefill
from tests.hub import MODEL, cache_models
from tests.slow import mostly_slow
from tests.verify.draft_model.test_draft_model import EAGER, PROMPT, count_rows
from tests.verify.heads.block_layouts import normal, turned
from tests.verify.heads.checkpoints import DRAFT_VOCABULARY, KINDS, load_pair, save_eagle, save_eagle3, save_target
from tests.verify.heads.sessions import GREEDY, begin, check_answers, check_chain_at_once, run_on, verifier_of

Pair = tuple[ModelRunner, HeadModel]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return {kind: load_pair(tmp_path_factory.mktemp("heads"), kind) for kind in KINDS}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return pairs[request.param]


@pytest.fixture
def eagle(pairs: dict[str, Pair]) -> Pair:
    return pairs["eagle"]


def begun(target: ModelRunner, head: HeadModel) -> tuple[Verifier, Any]:
    """Sessions of both that have read PROMPT."""
    session = HeadRunner(head).session()
    return begin(target, session, PROMPT), session


@torch.inference_mode()
def reference(target: ModelRunner, head: HeadModel, text: list[int], drafted: int) -> torch.Tensor:
    """The logits after a text by transformers' own attention, [V]. Its last `drafted` tokens read the head's own states."""
    assert isinstance(target, NativeRunner | TorchRunner)
    network = cast(Any, head.head)
    verifier, known = verifier_of(target), len(text) - drafted
    verifier.begin(np.array(text[:known], np.int32), GREEDY, 1)
    prefill(verifier)
    assert verifier.cache.hidden is not None
    states = head._fused(verifier.cache.hidden.read(0, known - 1))[None]
    embedded = target.embed_tokens(torch.tensor([text]))
    positions = torch.arange(len(text))[None]
    configs = [module.config for module in network.modules() if hasattr(module, "config")]
    for config in configs:
        config._attn_implementation = "sdpa"
    try:
        for _ in range(drafted + 1):
            size = states.shape[1]
            own = network.advance(embedded[:, 1 : size + 1], states, positions[:, 1 : size + 1], attention_mask=None)
            states = torch.cat([states, own[:, -1:]], 1)
    finally:
        for config in configs:
            config._attn_implementation = "outrider"
    return head.head.logits(own, head._lm_head)[0, -1]


def test_candidates_are_those_of_the_heads_layers(pair: Pair) -> None:
    target, head = pair
    _, session = begun(target, head)
    text = PROMPT.tolist()
    root = session.root(3)
    assert root.tokens[0].tolist() == reference(target, head, text, 0).topk(3).indices.tolist()
    first = int(root.tokens[0, 1])
    below = session.expand([int(root.tokens[0, 0]), first], [0, 0], 3)
    assert below.tokens[1].tolist() == reference(target, head, [*text, first], 1).topk(3).indices.tolist()
    second = int(below.tokens[1, 2])
    deeper = session.expand([second], [2], 3)
    assert deeper.tokens[0].tolist() == reference(target, head, [*text, first, second], 2).topk(3).indices.tolist()


CASES = [("eagle", "fusion"), *((kind, "draft-tree") for kind in KINDS)]


@pytest.mark.parametrize(("kind", "name"), mostly_slow(CASES, CASES[0], ("deep eagle3", "draft-tree")))
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 0.8], 0.8))
def test_answers_equal_plain_decoding(pairs: dict[str, Pair], kind: str, name: DrafterName, temperature: float) -> None:
    target, head = pairs[kind]
    check_answers(target, HeadRunner(head), name, temperature)


def test_a_chain_at_once_is_drafted_as_one_by_one(pair: Pair) -> None:
    _, session = begun(*pair)
    check_chain_at_once(session)


def test_drafts_of_the_targets_own_choices_are_accepted(eagle: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted rows are read again, with the target's states; no forward is added for that."""
    target, head = eagle
    verifier, session = begun(target, head)
    rows = count_rows(monkeypatch, head)
    chosen = answer_of(target, PROMPT, DecodeOptions(GREEDY, 4)).tokens
    session.root(1)
    assert sum(rows) == len(PROMPT) - 1  # no state is before the first token
    session.expand(chosen[:1], [0], 1)
    session.expand(chosen[1:2], [1], 1)
    run_on(verifier, session, chosen[:3])
    rows.clear()
    after = session.root(3)
    assert rows == [3]
    text = [*PROMPT.tolist(), *chosen[:3]]
    assert after.tokens[0].tolist() == reference(target, head, text, 0).topk(3).indices.tolist()


@pytest.mark.parametrize(("backend", "quantize"), [("torch", "none"), ("auto", "int4")])
def test_the_embedded_targets_head_drafts_its_tokens(backend: Backend, quantize: Quantize) -> None:
    loaded = LoadOptions(str(models.TARGET), dtype="float32", backend=backend, quantize=quantize)
    target = load_weights(loaded)
    head = load_head(str(models.HEAD), target)
    assert head is not None
    target.start(256)
    drafter = make("draft", Resources(EAGER, model=HeadRunner(head).session))
    prompt = load_tokenizer(str(models.TARGET)).encode("class Stack:\n    def __init__(self):\n")
    options = DecodeOptions(GREEDY, 24, max_nodes=8)
    found = decode(verifier_of(target), drafter, np.array(prompt, np.int32), options)
    assert found.tokens == answer_of(target, np.array(prompt, np.int32), DecodeOptions(GREEDY, 24)).tokens
    assert len(found.tokens) > 1.5 * len(found.steps)


@pytest.mark.parametrize("slots", [1, 2])
def test_a_fork_goes_on_with_the_rows_of_the_shared_text(eagle: Pair, monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    target, head = eagle
    drafter, verifier = make("draft", Resources(EAGER, model=HeadRunner(head, slots).session)), verifier_of(target)
    options = DecodeOptions(GREEDY, 6, max_nodes=20)
    decode(verifier, drafter, PROMPT, options)
    forked = verifier.clone(target.new_cache(), 15)
    copied = clone(drafter, verifier.sequence, forked.sequence)
    edited = np.concatenate([PROMPT[:15], [60, 61]]).astype(np.int32)
    rows = count_rows(monkeypatch, head)
    assert decode(forked, copied, edited, options).tokens == answer_of(target, edited, DecodeOptions(GREEDY, 6)).tokens
    assert rows[0] == (2 if slots == 2 else len(edited) - 1)
    assert forked.sequence.cache is forked.cache


def test_the_speed_of_a_head_is_measured_like_a_models(eagle: Pair) -> None:
    target, head = eagle
    shared: DraftRunner = HeadRunner(head)
    shared.measure(target)
    assert shared.pair.draft_seconds > 0


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = save_target(tmp_path_factory.mktemp("target"))
    return load_weights(LoadOptions(str(path), dtype="float32", device="cpu"))


def test_a_model_is_no_head(target: ModelRunner, tmp_path: Path) -> None:
    assert load_head(str(models.DRAFT), target) is None
    single = save_eagle(tmp_path)
    weights = torch.load(single / "pytorch_model.bin")
    torch.save({name: tensor for name, tensor in weights.items() if name != "fc.weight"}, single / "pytorch_model.bin")
    assert load_head(str(single), target) is None  # a model of one layer


def test_eagle_in_both_file_formats(target: ModelRunner, tmp_path: Path) -> None:
    folder = save_eagle(tmp_path)
    found = load_head(str(folder), target, pack=False)
    assert found is not None and isinstance(found.head, EagleHead)
    weights = torch.load(folder / "pytorch_model.bin")
    assert torch.equal(found.head.fc.bias, weights["fc.bias"])
    (folder / "pytorch_model.bin").unlink()
    save_file(weights | {"embed_tokens.weight": torch.zeros(97, 32)}, folder / "model.safetensors")
    again = load_head(str(folder), target, pack=False)
    assert again is not None and isinstance(again.head, EagleHead)
    assert torch.equal(again.head.fc.weight, found.head.fc.weight)


def test_eagle_3_has_its_own_vocabulary_and_reads_three_layers(target: ModelRunner, tmp_path: Path) -> None:
    found = load_head(str(save_eagle3(tmp_path)), target)
    assert found is not None and isinstance(found.head, Eagle3Head)
    assert found.head.layers_read == (2, 3, 3)
    logits = found.head.logits(torch.randn(1, 2, 32), torch.nn.Identity())
    assert logits.shape == (1, 2, 97)
    ids = torch.arange(DRAFT_VOCABULARY)
    assert torch.equal(logits[0, 0].isfinite().nonzero()[:, 0], ids + ids // 2)
    named = save_eagle3(tmp_path / "named", eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 5]})
    other = load_head(str(named), target)
    assert other is not None and other.head.layers_read == (0, 4, 5)


def test_an_eagle_3_head_of_several_layers_computes_what_its_authors_say(target: ModelRunner, tmp_path: Path) -> None:
    """The first layer attends to tokens and states, which are its residual; later ones are layers of a Llama."""
    folder = save_eagle3(tmp_path, layers=3)
    found = load_head(str(folder), target, pack=False)
    assert found is not None
    weights, states = torch.load(folder / "pytorch_model.bin"), torch.randn(5, 32)
    embedded, positions = torch.randn(5, 32), torch.arange(1, 6)
    attended = TorchAttention(found.new_cache().rows, ForwardBatch.chain(np.arange(5)))
    own = found.head.advance(embedded[None], states[None], positions[None], attention=attended, attention_mask=None)[0]

    rows = states
    for layer in ("layers.0", "layers.1", "layers.2"):
        inputs = normal(rows if layer > "layers.0" else embedded, weights[f"{layer}.input_layernorm.weight"])
        if layer == "layers.0":
            inputs = torch.cat([inputs, normal(states, weights[f"{layer}.hidden_norm.weight"])], -1)
        query, key, value = (
            (inputs @ weights[f"{layer}.self_attn.{part}_proj.weight"].T).view(5, -1, 8) for part in ("q", "k", "v")
        )
        query, key, value = (each.transpose(0, 1) for each in (turned(query, positions), turned(key, positions), value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)
        rows = rows + out.reshape(5, -1) @ weights[f"{layer}.self_attn.o_proj.weight"].T
        inputs, mlp = normal(rows, weights[f"{layer}.post_attention_layernorm.weight"]), f"{layer}.mlp."
        gate, up = (inputs @ weights[f"{mlp}{part}_proj.weight"].T for part in ("gate", "up"))
        rows = rows + (silu(gate) * up) @ weights[f"{mlp}down_proj.weight"].T
    assert torch.allclose(own, rows, atol=1e-4)


class Unsafe:
    """An object whose loading would run code."""


def test_an_mtp_layer_comes_from_the_targets_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_models(monkeypatch, tmp_path / "hub", {"v2": save_target(tmp_path / "target", "qwen3_5")})
    target = load_weights(LoadOptions(MODEL, "v2", dtype="float32", device="cpu"))
    head = load_head("mtp", target, "v2")
    assert head is not None and isinstance(head.head, MtpHead)
    assert isinstance(target, TorchRunner) and target.model.config.name_or_path == MODEL


def test_what_cannot_be_loaded_is_named(target: ModelRunner, tmp_path: Path) -> None:
    def refuse(folder: Path, **config: object) -> str:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
        with pytest.raises(ModelError) as refused:
            load_head(str(folder), target)
        return str(refused.value)

    assert "are Medusa's, which are not supported" in refuse(save_eagle(tmp_path / "other"), medusa_num_heads=4)
    unsafe = save_eagle(tmp_path / "unsafe")
    torch.save({"fc.weight": Unsafe()}, unsafe / "pytorch_model.bin")
    assert "cannot be loaded (UnpicklingError" in refuse(unsafe)
    assert "layers.1.input_layernorm.weight is missing" in refuse(save_eagle3(tmp_path / "deep"), num_hidden_layers=2)
    assert "layers that the target does not have" in refuse(
        save_eagle3(tmp_path / "layers"), eagle_aux_hidden_state_layer_ids=[0, 4, 9]
    )
    folder = save_eagle(tmp_path / "parts")
    weights = torch.load(folder / "pytorch_model.bin")
    del weights["layers.0.mlp.up_proj.weight"]
    torch.save(weights, folder / "pytorch_model.bin")
    assert "layers.0.mlp.up_proj.weight is missing" in refuse(folder)
    torch.save(weights | {"fc.weight": torch.zeros(48, 96)}, folder / "pytorch_model.bin")
    assert "reads 96 values per token, and this target gives 2 times 32" in refuse(folder)
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1")
    assert "cannot be loaded" in refuse(folder)
    (folder / "pytorch_model.bin").unlink()
    assert load_head(str(folder), target) is None  # a model of one layer, in several files
    assert "There are no weights" in refuse(folder, architectures=["EagleLlamaForCausalLM"])
    folder = save_eagle3(tmp_path / "ids")
    weights = torch.load(folder / "pytorch_model.bin")
    torch.save(weights | {"d2t": weights["d2t"] - 500}, folder / "pytorch_model.bin")
    assert "drafts tokens that the target does not have" in refuse(folder)
    with pytest.raises(ModelError, match="has no multi-token prediction layer"):
        load_head("mtp", target)


def test_a_target_without_hidden_states_is_refused() -> None:
    target = cast(ModelRunner, object())
    with pytest.raises(ModelError, match=r"reads hidden states, which llama\.cpp does not give; use a draft model"):
        load_head(MTP, target)
