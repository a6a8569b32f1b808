"""Says in the log which parts of a start take long."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("outrider.worker")
# Shorter parts are logged for debugging only.
LONG_SECONDS = 1.0


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Logs how long a part of the start took, such as "loading weights"."""
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    log.log(logging.INFO if seconds >= LONG_SECONDS else logging.DEBUG, "%s took %.1f s", part, seconds)
