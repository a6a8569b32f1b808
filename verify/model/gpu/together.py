"""Compiles Triton's kernels together, in threads, instead of one after the other when each is launched for the first time.

`AsyncCompileMode` is Triton's own, in 3.6 and 3.7. Every launch calls `JITFunction.run`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_together() -> Iterator[None]:
    """Kernels that are launched inside are only compiled: their outputs have any values. All are ready when the context ends.

    One that cannot be compiled raises when it is launched later.
    """
    run = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        return run(kernel, *args, **options | {"warmup": True})

    jit: Any = JITFunction
    with ThreadPoolExecutor(os.cpu_count()) as threads, AsyncCompileMode(threads, ignore_errors=True):
        jit.run = compile_only
        try:
            yield
        finally:
            jit.run = run
