"""Tries every causal language model of transformers with a small random configuration: served, and exactly, or refused.

`python -m tests.verify.model.all_architectures` prints the table; `--out bench/results/architectures.md` writes it. Takes some
minutes. A model passes if its logits equal those of transformers' own forward for a prompt read in parts, and for every row of
a draft tree.
"""

from __future__ import annotations

import argparse
import inspect
import tempfile
import time
import warnings
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.drafters.interface import DraftTree
from outrider.verify.errors import ModelError, first_sentence
from outrider.verify.model.backend import load_model
from outrider.verify.model.batch import ForwardBatch
from outrider.verify.model.cpu.native.interface import NativeRunner
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner

VOCABULARY, CONTEXT, LAYERS, HIDDEN, HEADS, HEAD_DIM = 97, 512, 4, 32, 4, 8
# The sizes are set under whichever of these names a configuration has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"), CONTEXT),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim", "attention_hidden_size"), HIDDEN
    ),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads", "num_heads"), HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "decoder_ffn_dim", "shared_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_selected_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("head_dim", "attention_head_dim", "rotary_dim", "global_head_dim", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 2),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads", "linear_num_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("num_key_value_heads", "mamba_expand"), 2),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "mamba_n_heads"), 4),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
}
SIZES |= {"v_head_dim": 6, "mamba_d_state": 8, "is_decoder": True}
MIXED = ["sliding_attention", "full_attention"] * 2
DENSE = {"activation_sparsity_pattern": [0.0] * 4}
# By model type, where sizes depend on each other.
SPECIAL: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": MIXED, "num_kv_shared_layers": 2, "laurel_rank": 4, **DENSE},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16},
}
# Models with latent attention have as many key heads as heads.
LATENT = ("kv_lora_rank", "qk_rope_head_dim")
TREE_PARENTS = np.array([-1, 0, 1, 0, -1, 4], np.int32)
TREE_DEPTHS = np.array([1, 2, 3, 2, 1, 2], np.int32)
# The chunks of the prompt: steps, and one chunk that is longer than a step.
PREFIX = (0, 37, 38, 120)
# The limit of parameters.
LARGEST = 5_000_000
# The tolerated difference of logits, which are a few units large.
TOLERANCE = 1e-3
# This multiple of the error of transformers' own forward is tolerated, too.
ROUNDING_FACTOR = 8


@dataclass(frozen=True)
class Result:
    """What was found for an architecture."""

    model_type: str
    status: str  # served | wrong | refused | crashed | untested
    note: str = ""  # the sentence of a refusal
    kinds: str = ""  # of layers
    difference: float = 0.0
    is_native: bool = False  # whether the library computes it


def small(cls: Any) -> Any:
    """A small configuration of a class."""
    accepted = set(inspect.signature(cls.__init__).parameters) | set(vars(cls())) | set(getattr(cls, "attribute_map", {}))
    values = {name: value for name, value in SIZES.items() if name in accepted}
    if set(LATENT) <= values.keys():
        values |= {"num_key_value_heads": HEADS, "head_dim": values["qk_rope_head_dim"]}
    values |= SPECIAL.get(cls.model_type, {})
    nested = getattr(cls, "sub_configs", {}).get("text_config")
    if nested is not None and inspect.isclass(nested) and hasattr(nested, "model_type"):
        return cls(text_config=small(nested).to_dict())
    without = {key: value for key, value in values.items() if key != "head_dim"}  # some compute it
    for values_tried in (values, without):
        try:
            return cls(**values_tried)
        except (AttributeError, TypeError, ValueError) as error:
            failure = error
    raise failure


def reference_of(config: Any) -> Any:
    """transformers' own model with random weights. Raises whatever transformers raises."""
    with torch.device("meta"):
        size = sum(each.numel() for each in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"it has {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter.numel():
                parameter.normal_(std=0.2)
        model(torch.arange(3, 9)[None], use_cache=False)
    return model


def attempt(model_type: str) -> Result:
    """Builds, saves, loads and compares one architecture."""
    try:
        model = reference_of(small(CONFIG_MAPPING[model_type]))
    except Exception as error:
        return Result(model_type, "untested", f"no small configuration: {type(error).__name__}: {first_sentence(error)[:120]}")
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            runner = load_model(LoadOptions(folder, device="cpu", dtype="float32"))
        except ModelError as error:
            return Result(model_type, "refused", str(error).replace(repr(folder), "PATH"))
        except Exception as error:
            return Result(model_type, "crashed", f"{type(error).__name__}: {first_sentence(error)[:120]}")
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    try:
        difference, tolerated = compare(runner, reference.eval()), TOLERANCE
        if difference >= TOLERANCE:
            tolerated += ROUNDING_FACTOR * rounding_error(reference, random_text())
    except Exception as error:
        return Result(model_type, "crashed", f"{type(error).__name__}: {first_sentence(error)[:120]}")
    status = "served" if difference < tolerated else "wrong"
    return Result(model_type, status, "", kinds(runner), difference, isinstance(runner, NativeRunner))


def random_text() -> torch.Tensor:
    """The text on which logits are compared."""
    return torch.randint(3, VOCABULARY, (PREFIX[-1],), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def rounding_error(model: Any, text: torch.Tensor) -> float:
    """The largest difference of a float32 model's logits from those in float64.

    Layers that normalise small values amplify rounding, differently by CPU.
    """
    found, exact = model(text[None], use_cache=False).logits, deepcopy(model).double()
    if hasattr(exact, "set_experts_implementation"):  # the default one computes in float32 at most
        exact.set_experts_implementation("eager")
    torch.set_default_dtype(torch.float64)
    try:
        return float((found - exact(text[None], use_cache=False).logits).abs().max())
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def compare(runner: ModelRunner, model: Any) -> float:
    """The largest difference of logits from transformers' own, for a prompt in parts and for a tree."""
    text = random_text()
    expected, cache, worst = model(text[None], use_cache=False).logits[0], runner.new_cache(), 0.0
    for start, stop in pairwise(PREFIX):
        found = torch.as_tensor(runner.forward(cache, ForwardBatch.chain(text[start:stop])))
        worst = max(worst, float((found - expected[start:stop]).abs().max()))
        cache.length = stop
    tokens = np.arange(10, 10 + len(TREE_PARENTS), dtype=np.int32)
    tree = DraftTree(tokens, TREE_PARENTS, TREE_DEPTHS, np.ones(len(tokens), np.float32), np.zeros(len(tokens), np.uint8))
    logits = torch.as_tensor(runner.forward(cache, ForwardBatch.tree(9, tree))).clone()
    for row in range(-1, len(tree)):
        path = torch.cat([text, torch.tensor([9, *tree.path(row)])])
        worst = max(worst, float((logits[row + 1] - model(path[None], use_cache=False).logits[0, -1]).abs().max()))
    return worst


def kinds(runner: ModelRunner) -> str:
    """The kinds of the model's layers, in words."""
    shape, found = runner.cache_shape, []
    layers = getattr(shape, "layers", ())
    if layers:
        found.append("attention" if isinstance(layers, int) or len(set(layers)) == 1 else "attention of several shapes")
    recurrent = getattr(shape, "recurrent", None)
    if recurrent is not None:
        found += ["state"] * bool(recurrent.states) + ["convolution"] * bool(recurrent.convolutions)
    return ", ".join(found)


def results(names: list[str]) -> Iterator[Result]:
    """One by one, as they are found."""
    for name in names or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        started = time.perf_counter()
        result = attempt(name)
        print(f"{name}: {result.status} {result.note or result.kinds} {result.difference:.0e}", end=" ", flush=True)
        print(f"({time.perf_counter() - started:.1f} s)", flush=True)
        yield result


def page(found: list[Result]) -> str:
    """The table as a page of the documentation."""
    counts = {status: sum(each.status == status for each in found) for status in ("served", "refused", "untested")}
    rows = []
    for each in found:
        exactness = f"{each.difference:.0e}" if each.status == "served" else ""
        notes = each.kinds or each.note.replace("|", "\\|")
        computed = ("the library" if each.is_native else "PyTorch") if each.status == "served" else ""
        rows.append(f"| {each.model_type} | {each.status} | {computed} | {exactness} | {notes} |")
    return PAGE.format(version=transformers.__version__, **counts, total=len(found), rows="\n".join(rows))


PAGE = """# Architectures

Written by `python -m tests.verify.model.all_architectures --out bench/results/architectures.md`, which tries every causal
language model of transformers {version} with a small random configuration on a CPU in float32. {served} of {total}
architectures are served, {refused} are refused with one sentence, and {untested} have no small configuration that could be
tried.
[Models](../../docs/models.md) explains the columns.

| architecture | status | computed by | difference | layers, or why not |
|---|---|---|---|---|
{rows}
"""


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; default: all")
    parser.add_argument("--out", type=Path, help="file for the page")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    found = list(results(options.names))
    for status in ("served", "wrong", "refused", "crashed", "untested"):
        print(f"{status}: {sum(each.status == status for each in found)}")
    if options.out:
        options.out.write_text(page(found))


if __name__ == "__main__":
    main()
