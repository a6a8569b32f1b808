"""The networks of draft heads: EAGLE (arXiv 2401.15077), EAGLE-3 (2503.01840) and MTP (DeepSeek-V3, 2412.19437).

A row of a head has a token and the state at the position before it: the target's hidden state where the target has computed
that position, otherwise the head's own. It computes a state of its own, which gives the logits of the next token. Knows nothing
about caches or checkpoints. Parameters have the names of the published checkpoints.
"""

from abc import ABC, abstractmethod
from typing import Any, cast

import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Head(torch.nn.Module, ABC):
    """A head on its target's device."""

    layers_read: tuple[int, ...] = ()  # the target's layers whose inputs are the states; () = its last hidden state, normalised
    size: int  # width of the head's own states

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """States of the target [1, N, W] to states as the head's own, [1, N, size]."""
        return states

    @abstractmethod
    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        """Computes each row's state [1, N, size] from its embedding [1, N, E], the previous state and its position [1, N].

        `others` are handed to the layers.
        """

    def logits(self, states: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
        """The next token's logits [1, N, V] from the rows' own states; `lm_head` is the target's."""
        return cast(torch.Tensor, lm_head(states))


class EagleHead(Head):
    """EAGLE: predicts the target's next hidden state."""

    def __init__(self, config: LlamaConfig, bias: bool = False) -> None:
        super().__init__()
        self.size = config.hidden_size
        self.fc = torch.nn.Linear(2 * self.size, self.size, bias=bias)
        self.layers = torch.nn.ModuleList(LlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        cast(Any, self.layers[0]).input_layernorm = torch.nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        rows, rotation = self.fc(torch.cat([embedded, states], -1)), self.rotary(embedded, positions)
        for layer in self.layers:
            rows = layer(rows, position_embeddings=rotation, **others)
        return cast(torch.Tensor, rows)


class Eagle3Layer(LlamaDecoderLayer):  # type: ignore[misc]  # transformers carries no types
    """The first layer of EAGLE-3: its attention reads the tokens and the states side by side."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__(config, 0)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            wide = torch.nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **others: Any) -> torch.Tensor:
        normal = self.hidden_norm(states)
        residual = normal if self.norm_before_residual else states
        attended, _ = self.self_attn(torch.cat([self.input_layernorm(embedded), normal], -1), **others)
        rows = residual + attended
        return cast(torch.Tensor, rows + self.mlp(self.post_attention_layernorm(rows)))


class Eagle3Head(Head):
    """EAGLE-3: reads the inputs of three of the target's layers, and has a vocabulary of its own."""

    def __init__(
        self,
        config: LlamaConfig,
        layers_read: tuple[int, ...],
        target_size: int,
        draft_vocabulary: int,
        norm_before_residual: bool = False,
    ) -> None:
        super().__init__()
        self.layers_read = layers_read
        self.size = config.hidden_size
        self._vocabulary = config.vocab_size
        self.fc = torch.nn.Linear(len(layers_read) * target_size, self.size, bias=False)
        later = (LlamaDecoderLayer(config, index) for index in range(1, config.num_hidden_layers))
        self.layers = torch.nn.ModuleList([Eagle3Layer(config, norm_before_residual), *later])
        self.norm = LlamaRMSNorm(self.size, eps=config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(self.size, draft_vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(draft_vocabulary, dtype=torch.int64))  # the target's id minus the own one

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self.fc(states))

    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        others["position_embeddings"] = self.rotary(embedded, positions)
        first, *later = self.layers
        rows = first(embedded, states, **others)
        for layer in later:
            rows = layer(rows, **others)
        return cast(torch.Tensor, rows)

    def logits(self, states: torch.Tensor, lm_head: torch.nn.Module) -> torch.Tensor:
        own = self.lm_head(self.norm(states))
        found = own.new_full((*own.shape[:2], self._vocabulary), -torch.inf)
        found[..., torch.arange(own.shape[-1], device=own.device) + cast(torch.Tensor, self.d2t)] = own
        return cast(torch.Tensor, found)


class MtpHead(Head):
    """A multi-token prediction layer of the target's own checkpoint."""

    def __init__(self, layer: torch.nn.Module, rotary: torch.nn.Module, size: int) -> None:
        """The layer of transformers' MtpModel, and the table of rotary angles of all layers."""
        super().__init__()
        self.size, self.layer, self.rotary = size, layer, rotary

    def advance(self, embedded: torch.Tensor, states: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        found = self.layer(
            embedded,
            states,
            position_embeddings=self.rotary(embedded, positions),
            position_ids=positions,
            past_key_values=None,
            **others,
        )
        return cast(torch.Tensor, found)
