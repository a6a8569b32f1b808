"""`python -m tests.verify.loading_peak MODEL int8|int4`: peak memory of loading a model, in a process of its own.

Counts anonymous memory (RssAnon in /proc/self/status), above that of the process before it loads. Pages of the checkpoint's
files, which are mapped into memory, are not counted: the system drops them when it needs memory.
"""

import json
import sys
import threading
from pathlib import Path

import transformers.models.llama.configuration_llama  # noqa: F401  # counts as idle memory

from outrider.verify.model.backend import load as load_weights
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.structures import PROJECTIONS
from outrider.verify.model.load_options import LoadOptions, Quantization, Quantize

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
    Engine.shared()  # loads the library
    idle = anonymous_bytes()
    peak = Peak()
    peak.start()
    runner = load_weights(LoadOptions(path, device="cpu", quantization=Quantization(quantize)))
    used = peak.stop() - idle
    assert isinstance(runner, NativeRunner)
    shapes = [runner.decoder.shape_of(0, name) for name in PROJECTIONS]
    layer = 2 * sum(outputs * inputs for outputs, inputs in shapes)
    quantized = runner.decoder.size.nbytes + runner.decoder.table.nbytes
    figures = {"peak_bytes": used, "quantized_bytes": quantized, "layer_bytes": layer}
    print(json.dumps(figures | {"ratio": round(used / (quantized + layer), 3)}))


if __name__ == "__main__":
    main(sys.argv[1], "int8" if sys.argv[2] == "int8" else "int4")
