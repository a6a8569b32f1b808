"""`python -m tests.verify.loading_peak MODEL int8|int4`: peak memory of loading a model, in a process of its own.

Counts anonymous memory (RssAnon in /proc/self/status), above that of the process before it loads. Pages of the checkpoint's
files, which are mapped into memory, are not counted: the system drops them when it needs memory.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import torch
import transformers.models.llama.modeling_llama  # noqa: F401  # counts as idle memory

from outrider.verify.model.cpu.native import interface as native
from outrider.verify.model.load_options import LoadOptions, Quantization, Quantize
from outrider.verify.model.loading import load_weights
from outrider.verify.model.packed import PackedLayer, packed_layers

INTERVAL_SECONDS = 0.002


def anonymous_bytes() -> int:
    """Anonymous memory of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


class Peak(threading.Thread):
    """Watches the memory until `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS):
            self.bytes = max(self.bytes, anonymous_bytes())

    def stop(self) -> int:
        """The peak."""
        self._stopped.set()
        self.join()
        return max(self.bytes, anonymous_bytes())


def main(path: str, quantize: Quantize) -> None:
    for bits in (8, 4):  # loads kernels and libraries
        native.quantized(torch.nn.Linear(64, 64), bits)(torch.zeros(1, 1, 64))
    idle = anonymous_bytes()
    peak = Peak()
    peak.start()
    runner = load_weights(LoadOptions(path, device="cpu", quantization=Quantization(quantize)))
    used = peak.stop() - idle
    layers = [module for module in runner.model.model.layers[0].modules() if isinstance(module, PackedLayer)]
    layer = sum(each.in_features * each.out_features for each in layers) * runner.model.dtype.itemsize
    quantized = sum(each.nbytes for each in packed_layers(runner.model))
    figures = {"peak_bytes": used, "quantized_bytes": quantized, "layer_bytes": layer}
    print(json.dumps(figures | {"ratio": round(used / (quantized + layer), 3)}))


if __name__ == "__main__":
    main(sys.argv[1], "int8" if sys.argv[2] == "int8" else "int4")
