"""Small models of architectures that llama.cpp has, with random weights."""

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from tests.verify.model.cpu.native.files import finish


def write_mamba(path: Path, hidden: int = 64, layers: int = 2, vocabulary: int = 512) -> None:
    """A Mamba, whose layers keep states, without a tokenizer."""
    inner, state, kernel, steps = 2 * hidden, 16, 4, 8
    writer = gguf.GGUFWriter(path, "mamba")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(steps)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("no_vocab")
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float | None = None) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * (scale or shape[-1] ** -0.5)).astype(np.float32)

    tensors = {
        "token_embd.weight": normal(vocabulary, hidden, scale=1.0),
        "output_norm.weight": np.ones(hidden, np.float32),
        "output.weight": normal(vocabulary, hidden, scale=0.4),
    }
    for layer in range(layers):
        tensors |= {
            f"blk.{layer}.{name}": values
            for name, values in {
                "attn_norm.weight": np.ones(hidden, np.float32),
                "ssm_in.weight": normal(2 * inner, hidden),
                "ssm_conv1d.weight": normal(inner, kernel),
                "ssm_conv1d.bias": normal(inner, scale=0.1),
                "ssm_x.weight": normal(steps + 2 * state, inner),
                "ssm_dt.weight": normal(inner, steps),
                "ssm_dt.bias": normal(inner, scale=0.5),
                "ssm_a": -np.exp(normal(inner, state, scale=0.3)),
                "ssm_d": np.ones(inner, np.float32),
                "ssm_out.weight": normal(hidden, inner),
            }.items()
        }
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    finish(writer)
