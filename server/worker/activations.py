"""What activations have taken of each GPU, for the memory plan of the next start: the first one plans with a share."""

import json
from collections.abc import Mapping
from pathlib import Path

from outrider.verify.findings import save_finding
from outrider.verify.model.memory import Device, peak_bytes

# A longer context than the measured one, which the plan may then have, takes more.
MARGIN = 1.25


class Activations:
    """The most bytes beside weights and caches, by the device's name. Without a file, nothing is known or kept."""

    def __init__(self, devices: Mapping[str, Device], file: Path | None) -> None:
        """Call it once the weights are on these GPUs."""
        self._devices, self._file = devices, file
        self._known = read(file) if devices else {}
        self._before = {name: peak_bytes(device, restarts=True) for name, device in devices.items()}

    def reserved(self, name: str) -> int | None:
        """The bytes to leave on a device; None if nothing is known."""
        return int(MARGIN * self._known[name]) if name in self._known else None

    def observe(self, caches: Mapping[str, int]) -> None:
        """Keeps what has been taken up to now beside the bytes of the caches, if it is more than ever."""
        found = {name: peak_bytes(device) - self._before[name] - caches[name] for name, device in self._devices.items()}
        more = {name: size for name, size in found.items() if size > self._known.get(name, 0)}
        if more:
            self._known |= more
            save_finding(self._known, self._file)


def read(file: Path | None) -> dict[str, int]:
    """The bytes by device in a file; nothing if it is not one."""
    try:
        saved = {} if file is None else json.loads(file.read_text())
        return {str(name): int(size) for name, size in saved.items() if size > 0}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}
