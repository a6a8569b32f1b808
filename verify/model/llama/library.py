"""The part of llama.cpp's interface that a runner needs, by the package llama-cpp-python.

Promises that calls of several threads come one after the other. Knows nothing about sessions or trees.
"""

import ctypes
import logging
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.verify.errors import ModelError
from outrider.verify.gguf.llama_package import ERRORS, PACKAGE, is_installed, last_error, library
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.model.cache.kv_cache import OutOfPages
from outrider.verify.model.cpu.native.variants import processor_flags

log = logging.getLogger("outrider.worker")

# The most rows of a forward.
MOST_ROWS = 1024
# llama.cpp's numbers of the data types of keys and values, by `model.kv_dtype`.
KV_TYPES = {"auto": 1, "int8": 8}  # float16, Q8_0
KV_NAMES = {"auto": "float16", "int8": "int8"}
# The shares of a model's layers that are tried to be on the GPU.
GPU_SHARES = (1.0, 0.75, 0.5, 0.25, 0.0)
ALL_LAYERS, FLASH_ATTENTION = 1 << 30, 1


def has_gpu() -> bool:
    """Whether the package is installed and was built for a GPU."""
    return is_installed() and bool(library().llama_supports_gpu_offload())


class LlamaModel:
    """The weights of a GGUF file."""

    def __init__(self, file: Path, on_gpu: bool) -> None:
        """`on_gpu` offloads the layers if the library supports a GPU. Raises ModelError."""
        self._api = library()
        self.handle = self._load(file, on_gpu and bool(self._api.llama_supports_gpu_offload()))
        self._vocabulary = self._api.llama_model_get_vocab(self.handle)
        self.vocabulary = int(self._api.llama_vocab_n_tokens(self._vocabulary))
        self.context_tokens = int(self._api.llama_model_n_ctx_train(self.handle))
        self.weight_bytes = int(self._api.llama_model_size(self.handle))
        self.weights = int(self._api.llama_model_n_params(self.handle))

    def _load(self, file: Path, on_gpu: bool) -> Any:
        """Loads the file with as many layers on the GPU as it has memory for. Raises ModelError."""
        ERRORS.clear()
        parameters = self._api.llama_model_default_params()
        parameters.use_extra_bufts = "amx_tile" not in processor_flags()  # llama.cpp's kernels for AMX crash on some CPUs
        layers = layer_count(file) if on_gpu else 0
        for share in GPU_SHARES if on_gpu else (0.0,):
            parameters.n_gpu_layers = ALL_LAYERS if share == 1 else int(share * layers)
            if handle := self._api.llama_model_load_from_file(str(file).encode(), parameters):
                if on_gpu and share < 1:
                    log.warning(
                        "%s: %d of %d layers are on the GPU, which has no memory for more", file.name, share * layers, layers
                    )
                return handle
        raise ModelError(f"llama.cpp cannot load {str(file)!r} ({last_error()}); download it again, or give another file.")

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._api.llama_model_free(handle)

    @property
    def keeps_states(self) -> bool:
        """Whether layers have a state that cannot return to an earlier token."""
        return bool(self._api.llama_model_is_recurrent(self.handle) or self._api.llama_model_is_hybrid(self.handle))

    @property
    def is_decoder(self) -> bool:
        api = self._api
        return bool(api.llama_model_has_decoder(self.handle) and not api.llama_model_has_encoder(self.handle))

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(id for id in range(self.vocabulary) if self._api.llama_vocab_is_eog(self._vocabulary, id))

    @property
    def description(self) -> str:
        """The architecture, size and type of the weights."""
        text = ctypes.create_string_buffer(256)
        self._api.llama_model_desc(self.handle, text, len(text))
        return text.value.decode(errors="replace")


class LlamaContext:
    """The cache of all sequences, and forwards over it."""

    def __init__(self, model: LlamaModel, positions: int, threads: int, kv_dtype: str = "auto", sequences: int = 1) -> None:
        """A cache for `positions` of all sequences together. Raises ModelError."""
        self._model, self._api, self.sequences = model, library(), sequences
        self._lock = RLock()
        parameters = self._api.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = positions, sequences
        parameters.n_batch = parameters.n_ubatch = min(MOST_ROWS, positions)
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = KV_TYPES[kv_dtype]
        if kv_dtype != "auto":
            parameters.flash_attn_type = FLASH_ATTENTION
        # One buffer, in which sequences share the positions that they have in common; windows keep what is before them.
        parameters.kv_unified = parameters.swa_full = True
        self.handle = self._api.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            raise ModelError(
                f"llama.cpp has no memory for a cache of {positions} tokens; lower model.context_tokens, or free memory."
            )
        self._memory = self._api.llama_get_memory(self.handle)

    def __del__(self) -> None:
        if handle := getattr(self, "handle", None):
            self._api.llama_free(handle)

    def forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: Sequence[Sequence[int]],
        kept: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Computes rows of tokens [N] at positions [N], which belong to these sequences, and writes their keys and values.

        Returns the logits of the rows in `kept` [N], float32 [M, V], valid until the next forward. Raises OutOfPages.
        """
        counts = np.array([len(each) for each in sequences], np.int32)
        ids = np.concatenate([np.asarray(each, np.int32) for each in sequences])
        starts = ids.ctypes.data + 4 * (np.cumsum(counts, dtype=np.uint64) - counts.astype(np.uint64))
        batch = self._api.llama_batch()
        batch.n_tokens = len(tokens)
        outputs = kept.astype(np.int8)
        rows: dict[str, NDArray[Any]] = {
            "token": tokens,
            "pos": positions,
            "n_seq_id": counts,
            "seq_id": starts,
            "logits": outputs,
        }
        for name, kind in batch._fields_:
            if name in rows:
                setattr(batch, name, ctypes.cast(rows[name].ctypes.data, kind))
        with self._lock:
            result = self._api.llama_decode(self.handle, batch)
            if result == 1:
                raise OutOfPages("llama.cpp's cache has no room for the rows of this forward.")
            if result:
                raise RuntimeError(f"llama.cpp's forward failed with the code {result}: {' '.join(ERRORS)}")
            found = self._api.llama_get_logits(self.handle)
        return np.ctypeslib.as_array(found, (int(outputs.sum()), self._model.vocabulary))

    def copy(self, source: int, to: int, start: int, end: int) -> None:
        """Shares the positions from `start` to `end` of a sequence with another one."""
        with self._lock:
            self._api.llama_memory_seq_cp(self._memory, source, to, start, end)

    def remove(self, sequence: int, start: int) -> None:
        """Takes the positions from `start` on from a sequence."""
        with self._lock:
            self._api.llama_memory_seq_rm(self._memory, sequence, start, -1)

    def save(self, sequence: int, scratch: int, start: int, end: int) -> NDArray[np.uint8]:
        """The keys and values of a sequence's positions from `start` to `end`. The sequence `scratch` is empty."""
        with self._lock:
            self.copy(sequence, scratch, start, end)
            found = np.empty(self._api.llama_state_seq_get_size(self.handle, scratch), np.uint8)
            size = self._api.llama_state_seq_get_data(self.handle, _bytes(found), len(found), scratch)
            self.remove(scratch, 0)
        return found[:size]

    def restore(self, sequence: int, scratch: int, start: int, end: int, saved: NDArray[np.uint8]) -> None:
        """Adds what `save` has returned, and possibly bytes after it, to a sequence. Raises OutOfPages."""
        with self._lock:
            if not self._api.llama_state_seq_set_data(self.handle, _bytes(saved), len(saved), scratch):
                raise OutOfPages("llama.cpp's cache has no room for the rows of a session.")
            self.copy(scratch, sequence, start, end)
            self.remove(scratch, 0)


def layer_count(file: Path) -> int:
    """The number of a model's layers. Raises ModelError."""
    entries = read_metadata(str(file)).entries
    return int(entries.get(f"{entries.get('general.architecture')}.block_count", 0))


def name() -> str:
    """The library and its version, for people."""
    return f"llama.cpp ({PACKAGE} {version(PACKAGE)})"


def _bytes(array: NDArray[np.uint8]) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(ctypes.c_uint8))
