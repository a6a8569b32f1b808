"""The families of decoders that are known, and what neither their configurations nor their files say."""

from dataclasses import dataclass
from typing import Any

from outrider.verify.model.architecture.description import Activation, Norm, Scores, State


@dataclass(frozen=True)
class Family:
    """Properties that the models of a family share. The readers read names and numbers that a model states itself."""

    name: str  # in GGUF files
    norm: Norm = Norm.RMS
    activation: Activation = Activation.SILU  # a configuration's own counts more
    is_parallel: bool = False
    norms_after_attention: bool = True  # else files name the norm before the feed-forward part so
    scales_embeddings: bool = False  # by the root of their width
    norms_less_one: bool = False  # in checkpoints; files have the norms as they are used
    pairs_in_checkpoints: bool = False
    pairs_in_files: bool = False
    # Of this many layers, the last attends to the whole text, where a file with a window does not say it. None = no layer does.
    window_every: int | None = None
    local_base: float | None = None  # of the rotary tables of layers with a window, where a file does not say it
    scales_local: bool = False  # whether the scaling of positions also counts in layers with a window
    rotates_all: bool = True  # else only layers with a window
    plain_every: int | None = None  # of this many layers, the last does not encode positions
    capped: tuple[float, float] | None = None  # soft limits of scores and logits, where a file does not say them
    scores: Scores = Scores.SOFTMAX  # of mixtures, where a file does not say it
    is_latent: bool = False  # whether layers attend to latents
    normalizes: bool | None = None  # the weights of experts; None = as the configuration says
    truncates_yarn: bool = True  # where a file does not say it
    turns_experts: bool = False
    state: State | None = None  # of recurrent layers
    decays_rows: bool = False  # each row of a state decays by itself, and the gate is a sigmoid, as in Kimi Linear
    tiles_in_files: bool = False
    gates_attention: bool = False
    has_both: bool = False  # attention and recurrence in each layer
    encodes_positions: bool = True
    feeds: bool = True  # else a layer is a mixer or a feed-forward part
    scaling: float | None = None  # of scores; None = by the width of a head
    norms_values: bool = False
    wide_scaling_at: int | None = None  # models of this many layers scale scores by the width of all heads together


LLAMA = Family("llama", pairs_in_files=True)
GEMMA2 = Family(
    "gemma2",
    activation=Activation.GELU_TANH,
    scales_embeddings=True,
    norms_less_one=True,
    window_every=2,
    scales_local=True,
    capped=(50.0, 30.0),
    wide_scaling_at=46,
)
GEMMA4: dict[str, Any] = {
    "activation": Activation.GELU_TANH,
    "scales_embeddings": True,
    "local_base": 10000.0,
    "scaling": 1.0,
    "norms_values": True,
}
QWEN_STATES: dict[str, Any] = {
    "norms_less_one": True,
    "norms_after_attention": False,
    "state": State.DELTA_RULE,
    "gates_attention": True,
}
NEMOTRON_H: dict[str, Any] = {
    "activation": Activation.SQUARED_RELU,
    "state": State.STATE_SPACE,
    "encodes_positions": False,
    "feeds": False,
    "scores": Scores.SIGMOID,
}
LATENT: dict[str, Any] = {"is_latent": True, "pairs_in_checkpoints": True, "pairs_in_files": True}
# By `model_type` in config.json. Of those that share a name in GGUF files, the first one is taken for a file.
FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "ministral3": Family("mistral3", pairs_in_files=True),
    "qwen2": Family("qwen2"),
    "qwen3": Family("qwen3"),
    "gemma": Family("gemma", activation=Activation.GELU_TANH, scales_embeddings=True, norms_less_one=True),
    "gemma2": GEMMA2,
    "gemma3_text": Family(
        "gemma3",
        activation=Activation.GELU_TANH,
        scales_embeddings=True,
        norms_less_one=True,
        window_every=6,
        local_base=10000.0,
        wide_scaling_at=62,
    ),
    "gemma4_text": Family("gemma4", **GEMMA4, window_every=6, normalizes=True),
    "gemma4_unified_text": Family("gemma4", **GEMMA4, window_every=6),
    "gemma3n_text": Family("gemma3n", **GEMMA4, window_every=5),
    "phi3": Family("phi3"),
    "olmo2": Family("olmo2", window_every=4),
    "olmo3": Family("olmo2", window_every=4),
    "smollm3": Family("smollm3", pairs_in_files=True, plain_every=4),
    "glm4": Family("glm4", pairs_in_checkpoints=True, pairs_in_files=True),
    "granite": Family("granite", pairs_in_files=True),
    "cohere2": Family(
        "cohere2",
        norm=Norm.LAYER,
        is_parallel=True,
        pairs_in_checkpoints=True,
        pairs_in_files=True,
        window_every=4,
        scales_local=True,
        rotates_all=False,
    ),
    "nemotron": Family("nemotron", norm=Norm.LAYER, activation=Activation.SQUARED_RELU, norms_less_one=True),
    "seed_oss": Family("seed_oss", norms_after_attention=False),
    "exaone4": Family("exaone4", window_every=4, rotates_all=False),
    "ernie4_5": Family("ernie4_5", pairs_in_checkpoints=True, pairs_in_files=True),
    "arcee": Family("arcee", activation=Activation.SQUARED_RELU, pairs_in_files=True),
    "mixtral": Family("llama", pairs_in_files=True, normalizes=True),
    "qwen2_moe": Family("qwen2moe", normalizes=None),
    "qwen3_moe": Family("qwen3moe"),
    "olmoe": Family("olmoe"),
    "granitemoe": Family("granitemoe", pairs_in_files=True, scores=Scores.CHOSEN_SOFTMAX),
    "glm4_moe": Family("glm4moe", norms_after_attention=False, scores=Scores.SIGMOID),
    "gpt_oss": Family(
        "gpt-oss",
        activation=Activation.CLAMPED_SILU,
        norms_after_attention=False,
        window_every=2,
        scales_local=True,
        scores=Scores.CHOSEN_SOFTMAX,
        truncates_yarn=False,
        turns_experts=True,
    ),
    "qwen3_5_text": Family("qwen35", **QWEN_STATES, tiles_in_files=True),
    "qwen3_5_moe_text": Family("qwen35moe", **QWEN_STATES, tiles_in_files=True, normalizes=True),
    "qwen3_next": Family("qwen3next", **QWEN_STATES),
    "lfm2": Family("lfm2", state=State.CONVOLUTION),
    "lfm2_moe": Family("lfm2moe", state=State.CONVOLUTION, scores=Scores.SIGMOID),
    "granitemoehybrid": Family("granitehybrid", pairs_in_files=True, state=State.STATE_SPACE, scores=Scores.CHOSEN_SOFTMAX),
    "bamba": Family("granitehybrid", pairs_in_files=True, state=State.STATE_SPACE),
    "falcon_h1": Family("falcon-h1", state=State.STATE_SPACE, has_both=True),
    "nemotron_h": Family("nemotron_h_moe", **NEMOTRON_H),
    "mamba2": Family("mamba2", state=State.STATE_SPACE, encodes_positions=False, feeds=False),
    "deepseek_v2": Family("deepseek2", **LATENT, normalizes=False),
    "deepseek_v3": Family("deepseek2", **LATENT, scores=Scores.SIGMOID),
    "glm4_moe_lite": Family("deepseek2", **LATENT, scores=Scores.SIGMOID),
    "youtu": Family("deepseek2", **LATENT),
    # No files have it; its tensors but those of recurrent layers have the names of this one.
    "olmo_hybrid": Family("olmo2", state=State.DELTA_RULE),
    "kimi_linear": Family(
        "kimi-linear", is_latent=True, state=State.DELTA_RULE, decays_rows=True, encodes_positions=False, scores=Scores.SIGMOID
    ),
    "ernie4_5_moe": Family("ernie4_5-moe", pairs_in_checkpoints=True, pairs_in_files=True, normalizes=True),
}


def summed(scores: Scores) -> int:
    """The scores whose sum is that of a group of experts: DeepSeek V2 takes the largest, and those with sigmoids take two."""
    return 1 if scores is Scores.SOFTMAX else 2


BY_FILE: dict[str, Family] = {}
for each in FAMILIES.values():
    BY_FILE.setdefault(each.name, each)
BY_FILE["nemotron_h"] = Family("nemotron_h", **NEMOTRON_H)  # without experts
