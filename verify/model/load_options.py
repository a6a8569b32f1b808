"""How a model is loaded, and to how many bits it is quantised. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outrider.verify.checkpoint import DEFAULT_REVISION
from outrider.verify.model.cache.shape import KVDtype

# outrider = our own kernels where they can compute a layer; auto = llama.cpp for a GGUF file where only llama.cpp has a GPU.
Backend = Literal["auto", "outrider", "torch", "llama.cpp"]
# torch.compile on a GPU: auto = if the model can be compiled; on = an error if it cannot.
Compile = Literal["auto", "on", "off"]
# Invariant rows on a GPU: auto = if the kernels give them; on = an error if they do not.
Invariant = Literal["auto", "on", "off"]
# The format of linear layers; the one that computes logits gets 8 bits. The embedding table stays as it is: a step reads few of
# its rows.
Quantize = Literal["none", "int8", "int4"]


@dataclass(frozen=True)
class LoadOptions:
    path: str  # local folder, hub id or GGUF file
    revision: str = DEFAULT_REVISION  # of the hub id
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda | cuda:N | cuda:N,cuda:M... | cuda:N+cuda:M...
    context_tokens: int | None = None  # None = the model's own limit
    trust_remote_code: bool = False
    backend: Backend = "auto"
    compile: Compile = "auto"
    quantize: Quantize = "none"
    kv_dtype: KVDtype = "auto"
    is_draft: bool = False  # drafts for another model
    packed_folder: Path | None = None  # of packed weights that later starts map; None = every start packs them

    @property
    def pack(self) -> bool:
        """Whether the weights of linear layers are repacked on a CPU."""
        return self.backend != "torch"
