"""The model runner: any dense causal model that transformers loads, unmodified, one forward at a time over our cache."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafters.interface import MAX_NODES
from verify.errors import ModelError, check_path, first_sentence
from verify.model.attention import NAME, Attention, ShapeProbe, TorchAttention
from verify.model.cache import CacheShape, KVCache
from verify.model.cpu_packing import PackedLinear, can_pack, pack_layers
from verify.model.cpu_trace import TracedForward, has_experts, trace

log = logging.getLogger("outrider.worker")

# On a GPU, kernels made for the model by torch.compile: where it can, or it is an error where it cannot, or none.
Compile = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    path: str  # a local folder or a hub id
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    context_tokens: int | None = None  # None = as many as the model was made for
    trust_remote_code: bool = False
    pack: bool = True  # on a CPU, linear layers in the layout that it multiplies fastest
    trace: bool = True  # on a CPU, forwards without Python
    compile: Compile = "auto"


class ForwardBackend(Protocol):
    """A quicker way through the model for the few rows of a step, all its arguments on the host."""

    def __call__(
        self, cache: KVCache, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor | None, known: int = 0
    ) -> torch.Tensor:
        """As `ModelRunner.forward`; the logits may be good only until the next call."""


class ModelRunner:
    """A loaded model and the shape of its cache. Forwards are stateless but for the cache they are given."""

    def __init__(
        self,
        model: PreTrainedModel,
        context_tokens: int | None = None,
        pack: bool = False,
        traced: bool = False,
        compile: Compile = "auto",
    ) -> None:
        """With `pack`, the linear layers are laid out anew where that helps; `traced` and `compile` as in LoadOptions.

        Raises ModelError.
        """
        if compile == "on" and model.device.type != "cuda":
            raise ModelError(
                "model.compile is for GPUs; on a CPU leave it at auto: packed layers and a traced forward take its place."
            )
        self.model = model.eval()
        self.weight_bytes = weight_bytes(model)  # that a step reads
        if pack and can_pack(model):
            pack_layers(model)
        config = model.config.get_text_config()
        self.device = model.device
        self.vocabulary = int(config.vocab_size)
        limit = int(config.max_position_embeddings)
        self.context_tokens = min(limit, context_tokens or limit)
        probe = ShapeProbe()
        self.cache_shape = self._probe(probe)
        self._backend: ForwardBackend | None = None
        if self.device.type == "cuda":
            self._backend = self._graphed(compile)
        elif traced:
            self._backend = trace(model, self.cache_shape, probe.windows, probe.groups, self.forward)

    def _graphed(self, compile: Compile) -> ForwardBackend:
        """CUDA graphs, or where the model cannot be captured the same kernels one by one."""
        from verify.model.cuda_graphs import CompileError, GraphedForward, compiled_layers  # needs Triton, which a CPU does not

        graphed = GraphedForward(partial(self._run, self.model, keep=0), self.cache_shape, self._positions)
        if has_experts(self.model):
            return graphed
        try:
            with nullcontext() if compile == "off" else compiled_layers(self.model):
                graphed.capture(self.new_cache())
        except CompileError as error:
            if compile == "on":
                raise ModelError(
                    f"torch.compile does not take this model, so set model.compile to auto or off: {first_sentence(error)}"
                ) from None
            log.warning("torch.compile does not take this model, so its steps take longer: %s", first_sentence(error))
            graphed.capture(self.new_cache())
        return graphed

    def _probe(self, probe: ShapeProbe) -> CacheShape:
        """What a position takes in the cache, found out by one forward. Raises ModelError."""
        try:
            token = torch.zeros(1, dtype=torch.long, device=self.device)
            self._run(self.model, token, token, probe, keep=1)
        except (ValueError, TypeError) as error:
            raise ModelError(f"This model cannot be served: {first_sentence(error)}") from None
        found = {shape for pair in probe.shapes.values() for shape in pair}
        if len(found) != 1 or set(probe.shapes) != set(range(len(probe.shapes))):
            raise ModelError("This model cannot be served: its layers do not all keep keys and values of one shape.")
        kv_heads, _, head_dim = found.pop()
        return CacheShape(len(probe.shapes), kv_heads, head_dim, self.model.dtype, self.device)

    @property
    def is_traced(self) -> bool:
        """Forwards run without Python."""
        return isinstance(self._backend, TracedForward)

    @property
    def _positions(self) -> int:
        """Of a slot: a full context, and the rows of one draft that may stand beyond its end."""
        return self.context_tokens + MAX_NODES + 1

    def new_cache(self) -> KVCache:
        """An empty cache for a full context."""
        return KVCache(self.cache_shape, self._positions)

    def forward(
        self,
        cache: KVCache,
        tokens: torch.Tensor,  # int64 [N]
        depths: torch.Tensor | None = None,  # int64 [N]: position minus the cache's length; None = 0, 1, 2, ...
        ancestors: torch.Tensor | None = None,  # bool [N, N]; None = each row sees those before it
        logits: bool = True,
        known: int = 0,
    ) -> torch.Tensor:
        """Runs N rows after the cache's committed tokens and writes their keys and values; commits nothing.

        The first `known` rows have been run before, in the same places. Takes tensors on the host. Returns the logits of the
        others, [N - known, V], on the model's device, good until the next forward; or those of the last row alone ([1, V])
        where `logits` is off.
        """
        if depths is None:
            depths = torch.arange(len(tokens))
        if self._backend is not None and logits and len(tokens) <= MAX_NODES + 1:
            return self._backend(cache, tokens, depths, ancestors, known)
        related = None if ancestors is None else ancestors.to(self.device)
        attention = TorchAttention(cache, len(tokens), related, known)
        positions = (depths[known:] + cache.length).to(self.device)
        return self._run(self.model, tokens[known:].to(self.device), positions, attention, keep=0 if logits else 1)

    @torch.inference_mode()
    def _run(self, model: Any, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention, keep: int) -> torch.Tensor:
        """The model's forward; logits of the last `keep` rows, of all where it is 0."""
        output = model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            attention=attention,
        )
        return cast(torch.Tensor, output.logits[0])


def load_model(options: LoadOptions) -> ModelRunner:
    """Loads `options.path`; raises ModelError with one sentence where that cannot be done."""
    check_path(options.path)
    try:
        config = AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"No model at {options.path!r}: {first_sentence(error)}") from None
    device = resolve_device(options.device)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            options.path,
            config=config,
            dtype=resolve_dtype(options.dtype, config, device),
            attn_implementation=NAME,
            use_safetensors=True,
            trust_remote_code=options.trust_remote_code,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(f"The model at {options.path!r} does not load: {first_sentence(error)}") from None
    if getattr(model, "_is_stateful", False):
        message = (
            "keeps a recurrent state, which cannot be taken back when a draft is rejected; serve a model of attention layers"
        )
        raise ModelError(f"The model at {options.path!r} {message}.")
    prepare(model.to(device), options.context_tokens)
    return ModelRunner(model, options.context_tokens, options.pack, options.trace, options.compile)


def prepare(model: PreTrainedModel, context_tokens: int | None) -> None:
    """Fixes what would make a token's keys depend on the rest of the forward that computes them.

    Some RoPE scalings (dynamic, longrope) take their frequencies from the longest position in a forward, so a draft would
    change its own root. They are fixed at those of a full context.
    """
    limit = int(model.config.get_text_config().max_position_embeddings)
    length = min(limit, context_tokens or limit)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and (kinds == "longrope" or "dynamic" in kinds):
            frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kinds](module.config, model.device, seq_len=length)
            module.inv_freq = frequencies
            module.rope_type = "default"


def weight_bytes(model: PreTrainedModel) -> int:
    """What a step reads: all parameters but the embedding table, of which it reads a row per token (unless the head is it)."""
    sizes = {parameter.data_ptr(): parameter.nbytes for parameter in model.parameters()}
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if isinstance(head, PackedLinear) or table.data_ptr() != head.weight.data_ptr():
        sizes.pop(table.data_ptr())
    packed = [module for module in model.modules() if isinstance(module, PackedLinear)]
    return int(sum(sizes.values())) + sum(layer.nbytes for layer in packed)


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The token ids that end an answer: those of the model's generation settings, and the tokenizer's."""
    found: set[int] = set() if tokenizer.eos_token_id is None else {int(cast(Any, tokenizer.eos_token_id))}
    ids = getattr(model.generation_config, "eos_token_id", None)
    found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)


def resolve_device(name: str) -> torch.device:
    """The device `name` stands for; raises ModelError where it is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"model.device is {name!r}, but torch sees no GPU here; use cpu or auto.")
    return device


def resolve_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype, except that a CPU without bfloat16 instructions computes in float32."""
    if name != "auto":
        return cast(torch.dtype, getattr(torch, name))
    stored = getattr(config, "dtype", None) or torch.float32
    if device.type == "cpu" and (stored != torch.bfloat16 or not torch.backends.cpu.get_cpu_capability().startswith("AVX512")):
        return torch.float32
    return cast(torch.dtype, stored)
