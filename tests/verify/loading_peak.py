"""`python -m tests.verify.loading_peak MODEL int8|int4`: peak memory of loading a model, in a process of its own.

Counts the memory that is no file's, above that of the process before it loads: the system drops mapped files when it needs
memory. Prints it relative to that of the quantised weights and one layer.
"""

import sys
import threading

import transformers.models.llama.configuration_llama  # noqa: F401  # counts as idle memory

from outrider.verify.model.backend import load
from outrider.verify.model.cpu.native.library import Engine
from outrider.verify.model.cpu.native.runner import NativeRunner
from outrider.verify.model.cpu.native.structures import PROJECTIONS
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.system_memory import own_bytes

INTERVAL_SECONDS = 0.002

if __name__ == "__main__":
    Engine.shared()  # loads the library
    idle, ended, found = own_bytes() or 0, threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(INTERVAL_SECONDS):
            found.append(own_bytes() or 0)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    runner = load(LoadOptions(sys.argv[1], device="cpu", quantize=("int8" if sys.argv[2] == "int8" else "int4")))
    ended.set()
    watcher.join()
    assert isinstance(runner, NativeRunner)
    shapes = [runner.decoder.shape_of(0, name) for name in PROJECTIONS]
    layer = 2 * sum(outputs * inputs for outputs, inputs in shapes)
    print((max(*found, own_bytes() or 0) - idle) / (runner.decoder.size.nbytes + runner.decoder.table.nbytes + layer))
