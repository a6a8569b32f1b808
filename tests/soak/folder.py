"""Trouble in the folder of saved sessions: damaged files, files of others, and a disk that is full at times.

A full disk is imitated by a limit on the size of the files that the worker may write: `write` fails, as it does without space.
"""

import asyncio
import contextlib
import random
import resource
from collections import Counter
from pathlib import Path

from bench.http.process import find_worker

DAMAGE_SECONDS = 10.0  # between two damaged files, so that most sessions are found on the disk; then the disk fills or empties
FULL_SHARE = 0.3  # of the time, in which the disk is full
FULL_BYTES = 4096  # that a file may have on a full disk


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def flip(data: bytes, rng: random.Random) -> bytes:
    """A few changed bytes, most of them in the header."""
    changed = bytearray(data)
    for _ in range(4 if data else 0):
        changed[rng.randrange(min(len(data), 4096 if rng.random() < 0.7 else len(data)))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def grow(data: bytes, rng: random.Random) -> bytes:
    return data + bytes(rng.randrange(1, 1 << 16))


class FolderTrouble:
    """Disturbs the sessions that a server saves in a folder. `counts` says what was done."""

    def __init__(self, folder: Path, server_id: int) -> None:
        self._folder = folder
        self._server_id = server_id
        self._rng = random.Random(0)
        self.counts: Counter[str] = Counter()

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            while True:
                self.limit(self._rng.random() < FULL_SHARE)
                await asyncio.sleep(DAMAGE_SECONDS)
                self.damage()
        finally:
            self.limit(False)

    def damage(self) -> None:
        """Changes a file of saved sessions in its place, or puts another one there."""
        files = sorted(path for path in self._folder.rglob("*.*") if path.suffix in (".session", ".page"))
        if not files:
            return
        file, rng = self._rng.choice(files), self._rng
        with contextlib.suppress(OSError):
            if rng.random() < 0.2:
                file.write_bytes(rng.choice(files).read_bytes())
                self.counts["swapped"] += 1
            elif rng.random() < 0.1:
                file.unlink()
                self.counts["removed"] += 1
            else:
                change = rng.choice((truncate, flip, grow))
                file.write_bytes(change(file.read_bytes(), rng))
                self.counts[change.__name__] += 1

    def limit(self, is_full: bool) -> None:
        """Fills the worker's disk, or frees it."""
        soft = FULL_BYTES if is_full else resource.RLIM_INFINITY
        worker = find_worker(self._server_id)
        with contextlib.suppress(OSError, ValueError):  # it has ended
            if worker is not None:
                resource.prlimit(worker, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        self.counts["full"] += is_full
