"""Architectures whose attention layers transformers has not written for its attention interface.

`outrider.verify.model.attention.older` replaces these layers. It imports and changes transformers' modules, so it is imported
only when such a model is loaded.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from outrider.verify.model.cache.shape import KVDtype

OLDER = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gpt_neox_japanese", "gptj", "mpt"})  # types of models


def is_older(config: PreTrainedConfig) -> bool:
    """Whether the layers of a model with this configuration are replaced."""
    return config.get_text_config().model_type in OLDER


def prepare_architecture(config: PreTrainedConfig) -> None:
    """Makes transformers able to build a model with this configuration and our attention. Call it before the model is built."""
    if is_older(config):
        import outrider.verify.model.attention.older  # noqa: F401  # adds our attention to transformers' tables


def replace_attention(model: torch.nn.Module, config: PreTrainedConfig, kv_dtype: KVDtype = "auto") -> None:
    """Replaces the forwards of older layers, if the model has any. Raises ModelError if the cache cannot hold their keys."""
    if is_older(config):
        from outrider.verify.model.attention import older

        older.replace_attention(model, kv_dtype)
