"""Attention layers that transformers has not written for its attention interface: those of Falcon, Bloom, MPT and older GPTs.

Their forwards are replaced by ones that call `tree_attention` with the layer's own projections.

ALiBi (Press et al., arXiv 2108.12409) adds a bias to the scores that grows with the key's position. Here keys and queries get
further dimensions, whose product is the bias of the key minus that of the query, which all scores of a row share. So caches and
the functions that compute attention need not know of it, and a key in a draft tree has the bias of its depth.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from transformers.models.bloom import modeling_bloom as bloom
from transformers.models.codegen import modeling_codegen as codegen
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gpt_neo import modeling_gpt_neo as gpt_neo
from transformers.models.gpt_neox_japanese import modeling_gpt_neox_japanese as gpt_neox_japanese
from transformers.models.gptj import modeling_gptj as gptj
from transformers.models.mpt import modeling_mpt as mpt

from outrider.verify.errors import ModelError
from outrider.verify.model.attention.interface import NAME, Attention, tree_attention
from outrider.verify.model.cache.shape import KVDtype
from outrider.verify.model.kwarg_injector import NotPassedOn, Receiver, device_of

# A bias is the sum of this many parts of 8 bits: it is large, and its difference to others is what matters.
PARTS = 4
# Biases are divided by this power of two, to be in the range of float16.
FACTOR = 64.0
# Keys and values are padded to a multiple of this width.
WIDTH_STEP = 8

# The classes are found by the name of the attention function, if this version of transformers has such a table.
vars(falcon).get("FALCON_ATTENTION_CLASSES", {})[NAME] = falcon.FalconAttention
vars(gpt_neo).get("GPT_NEO_ATTENTION_CLASSES", {})[NAME] = gpt_neo.GPTNeoSelfAttention
vars(gptj).get("GPTJ_ATTENTION_CLASSES", {})[NAME] = gptj.GPTJAttention
# It multiplies by the transposed weights, which quantised ones need not support.
falcon.FalconLinear.forward = torch.nn.Linear.forward


class Heads(NamedTuple):
    """Query, keys and values of a layer's rows, each [1, heads, N, width]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


class Alibi:
    """The biases of a layer."""

    def __init__(self, slopes: torch.Tensor, scaling: float = 1.0) -> None:
        """Slopes [heads], in the dtype that biases are rounded to; `scaling` is that of scores, 1 if it applies to biases."""
        self._slopes, self._scaling = slopes, scaling

    def bias(self, positions: torch.Tensor) -> torch.Tensor:
        """Of keys at these positions, int64 [N]: [heads, N], float64, to be added to scores that are not scaled yet."""
        return (self._slopes[:, None] * positions).double() / self._scaling

    def extend(self, heads: Heads, positions: torch.Tensor) -> Heads:
        """The heads with the bias in their products. Keys and values have one width, and each query head has its own."""
        query, key, value = heads
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value)) if groups > 1 else (key, value)
        rest, parts = self.bias(positions) / FACTOR, []
        for _ in range(PARTS):
            parts.append(rest.bfloat16().double())  # products of other dtypes may round to as few bits
            rest = rest - parts[-1]
        own = torch.stack(parts, -1).to(key.dtype)
        other = torch.full_like(own, FACTOR)
        # First the products that cancel each other, so that sums stay small where scores matter.
        key = torch.cat([torch.stack([own, other], -1).flatten(-2)[None], key], -1)
        query = torch.cat([torch.stack([other, -own], -1).flatten(-2)[None], query], -1)
        width = -(-key.shape[-1] // WIDTH_STEP) * WIDTH_STEP
        return Heads(*(torch.nn.functional.pad(each, (0, width - each.shape[-1])) for each in (query, key, value)))


class OlderAttention(Receiver, ABC):
    """Replaces the forward of one attention layer."""

    alibi: Alibi | None = None
    scaling: float | None = None  # factor of the scores; None = the usual one
    window: int | None = None  # sliding window

    def __init__(self, module: Any) -> None:
        self.module = module
        self._attention: Attention | None = None
        self._positions: torch.Tensor | None = None

    def __call__(
        self, *inputs: Any, attention: Attention | None = None, positions: torch.Tensor | None = None, **others: Any
    ) -> Any:
        """The layer's forward. Raises ValueError if it is called without our keyword arguments."""
        if attention is None:
            raise NotPassedOn("attention")
        self._attention, self._positions = attention, positions
        try:
            return self.forward(*inputs, **others)
        finally:
            self._attention = self._positions = None  # which hold a cache

    @abstractmethod
    def forward(self, *inputs: Any, **others: Any) -> Any:
        """What the layer returns for its inputs."""

    def attend(self, heads: Heads) -> torch.Tensor:
        """The weighted values, [1, N, heads, head_dim]."""
        width = heads.value.shape[-1]
        scaling = heads.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling
        if self.alibi is not None:
            rows, device = heads.query.shape[2], heads.query.device
            positions = torch.arange(rows, device=device) if self._positions is None else self._positions
            heads = self.alibi.extend(heads, positions)
        out, _ = tree_attention(self.module, *heads, None, scaling, self.window, attention=self._attention)
        return out[..., :width]


class FalconAttention(OlderAttention):
    """Falcon's: keys of all heads, of groups of heads, or of one head, and rotary embeddings or ALiBi."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        if module.config.alibi:
            pair = torch.ones(1, 2, dtype=torch.long, device=module.dense.weight.device)
            self.alibi = Alibi(falcon.build_alibi_tensor(pair, module.num_heads, torch.bfloat16)[:, 0, 1])

    def forward(self, hidden: torch.Tensor, position_embeddings: Any = None, **_: Any) -> Any:
        """As `FalconAttention.forward` of transformers."""
        heads = split(self.module.query_key_value(hidden), self.module.num_kv_heads, self.module.head_dim)
        if self.alibi is None:
            query, key = falcon.apply_rotary_pos_emb(heads.query, heads.key, *position_embeddings)
            heads = Heads(query, key, heads.value)
        return self.module.dense(self.attend(heads).flatten(2)), None


class BloomAttention(OlderAttention):
    """Bloom's."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        pair = torch.ones(1, 2, dtype=torch.long, device=module.dense.weight.device)
        slopes = bloom.build_alibi_tensor(pair, module.num_heads, torch.float64)[:, 0, 1]
        self.alibi = Alibi(slopes, module.inv_norm_factor)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor, **_: Any) -> Any:
        """As `BloomAttention.forward` of transformers."""
        heads = split(self.module.query_key_value(hidden), self.module.num_heads, self.module.head_dim)
        return self.module.dense(self.attend(heads).flatten(2)) + residual, None


class MptAttention(OlderAttention):
    """MPT's."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.scaling = module.softmax_scale
        biases = mpt.build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)  # [heads, 1, 2]
        self.alibi = Alibi((biases[:, 0, 1] - biases[:, 0, 0]).double(), module.softmax_scale)

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:
        """As `MptAttention.forward` of transformers."""
        fused, clip = self.module.Wqkv(hidden), self.module.clip_qkv
        fused = fused.clamp(-clip, clip) if clip else fused
        query, key, value = fused.unflatten(2, (3, self.module.n_heads, -1)).transpose(1, 3).unbind(2)
        return self.module.out_proj(self.attend(Heads(query, key, value)).flatten(2)), None


class InnerAttention(OlderAttention):
    """That of GPT-J, CodeGen and others, whose forward calls a method `_attn` between its projections."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        module._attn = self._attend_inside

    def forward(self, *inputs: Any, **others: Any) -> Any:
        """As the layer's class does."""
        return type(self.module).forward(self.module, *inputs, **others)

    def _attend_inside(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        """Replaces `_attn`: weighted values, [1, heads, N, head_dim]. Rotary embeddings of some are float32."""
        heads = Heads(query.to(value.dtype), key.to(value.dtype), value)
        return self.attend(heads).transpose(1, 2), None


class GPTNeoAttention(InnerAttention):
    """GPT-Neo's, without a scaling of scores."""

    scaling = 1.0

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        module.layer_idx = module.layer_id
        self.window = module.config.window_size if module.attention_type == "local" else None


REPLACEMENTS: dict[type[torch.nn.Module], type[OlderAttention]] = {
    bloom.BloomAttention: BloomAttention,
    codegen.CodeGenAttention: InnerAttention,
    falcon.FalconAttention: FalconAttention,
    gpt_neo.GPTNeoSelfAttention: GPTNeoAttention,
    gpt_neox_japanese.GPTNeoXJapaneseAttention: InnerAttention,
    gptj.GPTJAttention: InnerAttention,
    mpt.MptAttention: MptAttention,
}


def split(fused: torch.Tensor, kv_heads: int, head_dim: int) -> Heads:
    """A projection [1, N, size] in whose order the query heads of each key head precede it, and its values follow."""
    grouped = fused.unflatten(2, (kv_heads, -1, head_dim))
    rows = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    return Heads(*(each.transpose(1, 2) for each in rows))


def replace_attention(model: torch.nn.Module, kv_dtype: KVDtype = "auto") -> None:
    """Replaces the forwards of the model's layers of these classes. Raises ModelError if the cache cannot hold their keys."""
    for module in model.modules():
        if replacement := REPLACEMENTS.get(type(module)):
            module.forward = layer = replacement(module)
            if layer.alibi is not None and kv_dtype != "auto":
                raise ModelError(
                    "Keys of models with ALiBi carry biases, which take more than 8 bits; set model.kv_dtype to auto."
                )
        elif isinstance(module, mpt.MptModel):
            module.build_mpt_alibi_tensor = unused_biases
            module.register_forward_pre_hook(pass_mask, with_kwargs=True)


def unused_biases(*_: Any, **__: Any) -> None:
    """Replaces what MPT computes in each forward, for as many positions as it supports."""


def pass_mask(_: torch.nn.Module, inputs: Any, others: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Gives MPT an attention mask, which nothing reads: it converts the mask, and fails without one."""
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device_of(inputs, others))
    return inputs, others | {"attention_mask": mask}
