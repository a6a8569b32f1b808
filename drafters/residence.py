"""Keeps mapped datastores from filling memory: pages that were looked at are given back before they add up.

The kernel maps pages around each one that is touched, so a few thousand questions would make a whole datastore resident.
What is given back stays in the page cache as long as there is room, and costs a fault to see again.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from drafters import array_file
from drafters.suffix import Corpus

SHARE = 0.05  # of the blocks' size; a single question may add as much again
STATM = Path("/proc/self/statm")


class Residence:
    """Watches the blocks that one drafter reads. Where the system does not say what is resident, gives back every time."""

    def __init__(self, corpora: Sequence[Corpus]) -> None:
        self._corpora = corpora
        self._bound = int(SHARE * sum(array.nbytes for corpus in corpora for array in corpus[:-1]))
        self._statm = os.open(STATM, os.O_RDONLY) if corpora and STATM.exists() else None
        self._before = self._mapped_bytes()

    def __del__(self) -> None:
        if self._statm is not None:
            os.close(self._statm)

    def asked(self) -> None:
        """To be called after each question."""
        if not self._corpora:
            return
        if self._statm is None or self._mapped_bytes() - self._before > self._bound:
            for corpus in self._corpora:
                array_file.release(corpus.tokens)
            self._before = self._mapped_bytes()

    def _mapped_bytes(self) -> int:
        """File pages resident in this process."""
        if self._statm is None:
            return 0
        return int(os.pread(self._statm, 128, 0).split()[2]) * os.sysconf("SC_PAGE_SIZE")
