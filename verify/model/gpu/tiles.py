"""The sizes of what a program computes of a product, by a rule, and by timing on the GPU that is there.

No size changes a row's bits. Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime.errors import OutOfResources

from outrider.verify.findings import save_finding
from outrider.verify.model.gpu.text_work import capability
from outrider.verify.start_times import timed

# The tile size of the tensor cores, and the most rows of one tile: with more, registers do not suffice.
LEAST_ROWS, MOST_ROWS = 16, 128
# The numbers of outputs of a tile, and the most rows with which a tile of the largest one fits into the registers of any GPU.
OUTPUTS, FEW_ROWS = (64, 128, 256), 80
# The compute capabilities of Blackwell for data centres, and also of Hopper.
BLACKWELL = (100, 103)
ROOMY = (90, *BLACKWELL)
# The inputs that a program multiplies at once, and the most blocks of them that it reads ahead.
INPUTS, ENOUGH_STAGES, MOST_STAGES = 128, 3, 4
# The calls of a product that are timed together, of several layers so that no cache holds their weights, and how often.
CALLS, ROUNDS = 8, 5


class Gpu(NamedTuple):
    """The properties of a GPU that decide the sizes of tiles."""

    multiprocessors: int
    shared_bytes: int  # of a program, without what the compiler adds
    capability: int  # as `outrider.verify.model.gpu.text_work.capability`

    def fits(self, rows: int, bits: int) -> bool:
        """Whether a tile of 256 outputs and `rows` rows fits into the registers, for weights of `bits` bits.

        Tensor cores of Hopper and Blackwell read their inputs from shared memory, so fewer registers are needed there.
        Unpacking weights of fewer than 16 bits needs additional registers. Blackwell's tensor memory has the sums of each part
        of the inputs, and those of 4 bits have four.
        """
        is_roomy = self.capability in ROOMY and (bits > 4 or self.capability not in BLACKWELL)
        return is_roomy and rows <= FEW_ROWS if bits < 16 else rows <= (MOST_ROWS if is_roomy else FEW_ROWS)


class Tile(NamedTuple):
    """The sizes of a program's work; none of them changes a row's bits."""

    rows: int
    more_rows: int  # of the second block
    outputs: int
    inputs: int
    warps: int
    blocks: int = 0  # of inputs that are read ahead; 0 = by the shared memory

    @staticmethod
    def of(count: int, outputs: int, splits: int, gpu: Gpu, bits: int = 16, itemsize: int = 2, is_plain: bool = True) -> Tile:
        """The tile for a product of `count` rows. `itemsize` is the size in bytes of an element of the rows.

        Unless it `is_plain`, more than a bias becomes of outputs, for which the largest tiles leave no registers.

        Weights are read from memory once, but each tile reads the rows again, from the L2 cache. With many rows, this traffic
        limits the product, so the tile is chosen for which the busiest multiprocessor reads the fewest bytes. With few rows,
        many small programs hide the latency of memory better.
        """
        # Two blocks of float32 rows must fit into any shared memory, the sums of all parts into Blackwell's tensor memory, and
        # what becomes of outputs into the registers.
        is_tight = (bits == 4 and gpu.capability in BLACKWELL) or (not is_plain and gpu.capability not in ROOMY)
        is_narrow = bits < 16 and (itemsize > 2 or is_tight)
        most = MOST_ROWS // 2 if is_narrow else MOST_ROWS
        rows, more_rows = min(most, max(LEAST_ROWS, triton.next_power_of_2(count))), 0
        if 0 < count - rows // 2 <= LEAST_ROWS < rows // 2:
            rows, more_rows = rows // 2, LEAST_ROWS
        elif 0 < count - most <= LEAST_ROWS:
            more_rows = LEAST_ROWS

        smallest = Tile(rows, more_rows, OUTPUTS[0], 0, 0)
        if rows + more_rows <= FEW_ROWS:
            return smallest.sized(OUTPUTS[0], bits, itemsize)
        sizes = OUTPUTS if is_plain and itemsize == 2 and gpu.fits(rows + more_rows, bits) else OUTPUTS[:2]
        tiles = [smallest.sized(size, bits, itemsize) for size in sizes]
        # One of two blocks must fit: where shared memory is small, tensor cores have the other one in registers.
        tiles = [each for each in tiles if each.block_bytes(bits, itemsize) <= gpu.shared_bytes]
        found = min(tiles, key=lambda each: each.busiest_bytes(count, outputs, splits, gpu, bits, itemsize))
        # Ampere for data centres has the shared memory for twice the inputs, whose loop has fewer instructions per weight.
        longer = found._replace(inputs=INPUTS, blocks=ENOUGH_STAGES)
        is_ampere = bits == 16 and itemsize == 2 and gpu.capability not in ROOMY
        return longer if is_ampere and 2 * longer.block_bytes(bits, itemsize) <= gpu.shared_bytes else found

    def sized(self, outputs: int, bits: int, itemsize: int, blocks: int = 0) -> Tile:
        """The tile for as many rows with another number of outputs."""
        inputs = INPUTS // 2 if outputs > OUTPUTS[0] or self.rows == MOST_ROWS else INPUTS
        if bits < 16:
            inputs = INPUTS  # whole groups of weights, which are multiplied in parts
        elif itemsize > 2:
            inputs = INPUTS // 2  # products of float32 are three of TF32, each over a whole block
        return Tile(self.rows, self.more_rows, outputs, inputs, 4 if outputs == OUTPUTS[0] else 8, blocks)

    def others(self, gpu: Gpu, bits: int, itemsize: int) -> list[Tile]:
        """Further tiles for as many rows, which fit any GPU's registers and this one's shared memory."""
        found = [
            self.sized(outputs, bits, itemsize, blocks) for outputs in OUTPUTS[:2] for blocks in (ENOUGH_STAGES, MOST_STAGES)
        ]
        return [each for each in found if each.blocks * each.block_bytes(bits, itemsize) <= gpu.shared_bytes]

    def busiest_bytes(self, count: int, outputs: int, splits: int, gpu: Gpu, bits: int = 16, itemsize: int = 2) -> int:
        """The bytes, of weights and rows, that the busiest multiprocessor reads for each input feature of a program."""
        rows = self.rows + self.more_rows
        programs = splits * -(-outputs // self.outputs) * -(-count // rows)
        return -(-programs // gpu.multiprocessors) * (self.outputs * bits // 8 + min(count, rows) * itemsize)

    def block_bytes(self, bits: int = 16, itemsize: int = 2) -> int:
        """Bytes of shared memory for one block of inputs. `itemsize` is that of the rows."""
        return self.inputs * (self.outputs * bits // 8 + (self.rows + self.more_rows) * itemsize)

    def stages(self, shared_bytes: int, block_bytes: int) -> int:
        """How many blocks are read ahead: two programs of a multiprocessor hide more than further blocks do."""
        if self.blocks:
            return self.blocks
        of_two = min(MOST_STAGES, shared_bytes // 2 // block_bytes)
        return of_two if of_two >= ENOUGH_STAGES else max(2, min(MOST_STAGES, shared_bytes // block_bytes))


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU's figures; an H200's without one."""
    if device.type != "cuda":
        return Gpu(132, 226 << 10, 90)
    properties: Any = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_block_optin - 1024, capability(device))


class Product(NamedTuple):
    """What the tile of a product depends on."""

    inputs: int
    outputs: int
    bits: int
    group: int  # inputs that share a scale
    rows: int  # of a tile, by the rule
    more_rows: int
    epilogue: int
    is_normed: bool

    def __str__(self) -> str:
        return " ".join(str(int(each)) for each in self)


# Computes a product by another tile, again.
Call = Callable[[Tile], None]


class Tuning:
    """The tiles of a device's products that were found by timing."""

    def __init__(self) -> None:
        self.tiles: dict[str, Tile] = {}  # by `Product`
        self._calls: dict[str, tuple[list[Tile], list[Call]]] | None = None  # while products are noted

    def tile(self, product: Product, rule: Tile) -> Tile:
        return self.tiles.get(str(product), rule)

    def note(self, product: Product, tiles: list[Tile], call: Call) -> None:
        """Keeps a call of a product to time it, if calls are noted and its tile is not known. The first compiles all tiles."""
        if self._calls is not None and str(product) not in self.tiles:
            calls = self._calls.setdefault(str(product), (tiles, []))[1]
            for tile in tiles if not calls else ():
                call(tile)
            if len(calls) < CALLS:
                calls.append(call)

    @contextmanager
    def noted(self) -> Iterator[dict[str, tuple[list[Tile], list[Call]]]]:
        """Notes the products that are computed inside."""
        calls: dict[str, tuple[list[Tile], list[Call]]] = {}
        self._calls = calls
        try:
            yield calls
        finally:
            self._calls = None

    @contextmanager
    def timed(self, seconds: Callable[[Callable[[], Any]], float], file: Path | None) -> Iterator[None]:
        """Times the products that are compiled inside, and keeps each one's fastest tile, as `file` does for later starts."""
        self.tiles |= read(file)
        with self.noted() as calls:
            yield
        if not calls:
            return
        with timed(f"timing the tiles of {len(calls)} products"):
            for product, (tiles, some) in calls.items():
                times = [time_of(seconds, tile, some) for tile in tiles]
                self.tiles[product] = tiles[times.index(min(times))]
        save_finding({product: list(tile) for product, tile in self.tiles.items()}, file)


def time_of(seconds: Callable[[Callable[[], Any]], float], tile: Tile, calls: list[Call]) -> float:
    """The seconds of calls by a tile; infinite if the GPU has not the room for it."""
    try:
        return seconds(lambda: [call(tile) for call in calls])
    except OutOfResources:
        return math.inf


def read(file: Path | None) -> dict[str, Tile]:
    """The tiles in a file; none if it is not one."""
    try:
        saved = {} if file is None else json.loads(file.read_text())
        return {str(product): Tile(*map(int, sizes)) for product, sizes in saved.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


@cache
def tuning_of(device: torch.device) -> Tuning:
    return Tuning()


def replayed_seconds(work: Callable[[], Any]) -> float:
    """The fewest seconds of some replays of work in a graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        work()

    def once() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return min(once() for _ in range(ROUNDS))
