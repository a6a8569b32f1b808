"""The model runner: any dense causal model that transformers loads, unmodified, one forward at a time over our cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from drafters.draft import MAX_NODES
from verify.attention import NAME, AttentionStep
from verify.cache import CacheShape, KVCache


class ModelError(ValueError):
    """The model cannot be served; the message says why and what to do."""


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded."""

    path: str  # a local folder or a hub id
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda | cuda:N
    context_tokens: int | None = None  # None = as many as the model was made for
    trust_remote_code: bool = False


class ModelRunner:
    """A loaded model and the shape of its cache. Forwards are stateless but for the cache they are given."""

    def __init__(self, model: PreTrainedModel, context_tokens: int | None = None) -> None:
        self.model = model.eval()
        config = model.config.get_text_config()
        self.device = model.device
        self.vocabulary = int(config.vocab_size)
        limit = int(config.max_position_embeddings)
        self.context_tokens = min(limit, context_tokens or limit)
        heads = int(config.num_attention_heads)
        kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._groups = heads // kv_heads
        self.cache_shape = CacheShape(int(config.num_hidden_layers), kv_heads, head_dim, model.dtype, self.device)

    def new_cache(self) -> KVCache:
        """An empty cache for a full context; the rows of one draft may stand beyond its end."""
        return KVCache(self.cache_shape, self.context_tokens + MAX_NODES + 1)

    @torch.inference_mode()
    def forward(
        self,
        cache: KVCache,
        tokens: torch.Tensor,  # int64 [N]
        depths: torch.Tensor | None = None,  # int64 [N]: position minus the cache's length; None = 0, 1, 2, ...
        ancestors: torch.Tensor | None = None,  # bool [N, N]; None = each row sees those before it
        logits: bool = True,
    ) -> torch.Tensor:
        """Runs N rows after the cache's committed tokens and writes their keys and values; commits nothing.

        Returns the logits, [N, V], or those of the last row alone ([1, V]) where `logits` is off.
        """
        rows = len(tokens)
        if depths is None:
            depths = torch.arange(rows, device=self.device)
        output = self.model(
            input_ids=tokens[None],
            position_ids=(depths + cache.length)[None],
            use_cache=False,
            logits_to_keep=0 if logits else 1,
            step=AttentionStep(cache, rows, ancestors, self._groups),
        )
        return cast(torch.Tensor, output.logits[0])


def load_model(options: LoadOptions) -> ModelRunner:
    """Loads `options.path`; raises ModelError with one sentence where that cannot be done."""
    _check_path(options.path)
    try:
        config = AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"No model at {options.path!r}: {_first_sentence(error)}") from None
    device = resolve_device(options.device)
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Their frequencies depend on the longest position in a forward, so a draft would change its own root.
        raise ModelError(f"The model at {options.path!r} scales RoPE with the text's length, which drafts would disturb.")
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
        raise ModelError(f"The model at {options.path!r} does not load: {_first_sentence(error)}") from None
    runner = ModelRunner(model.to(device), options.context_tokens)
    try:  # one forward shows what the model's attention asks for
        runner.forward(runner.new_cache(), torch.zeros(1, dtype=torch.long, device=device))
    except (ValueError, TypeError) as error:
        raise ModelError(f"The model at {options.path!r} cannot be served: {_first_sentence(error)}") from None
    return runner


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`; raises ModelError."""
    _check_path(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(f"No tokenizer at {path!r}: {_first_sentence(error)}") from None
    return cast(PreTrainedTokenizerBase, tokenizer)


def _check_path(path: str) -> None:
    """Says what is wrong with a path before transformers takes it for a hub id. Raises ModelError."""
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "config.json").exists() and not (folder / "tokenizer.json").exists():
            raise ModelError(f"The folder {path!r} holds no model: it has neither config.json nor tokenizer.json.")
    elif folder.exists() or path.count("/") > 1 or path.startswith((".", "/", "~")):
        raise ModelError(f"There is no folder {path!r}; give a model's folder, or a hub id such as Qwen/Qwen3-8B.")


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary: equal for two tokenizers exactly when every id means the same token."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()[:16]


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


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:300]
