"""Counts the bytes and launches of a GPU's decoding step without one.

The forward of `GraphedForward` runs on tensors without values (`bench.model.fake_cuda`), so a model of any size takes no
memory. Knows nothing about time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import PreTrainedModel

from bench.model.counts import Counts
from bench.model.fake_cuda import CUDA, Device, fake_cuda, fake_model
from outrider.drafters.interface import Source, chain
from outrider.verify.measurement import FEEDBACK
from outrider.verify.model.gpu.compilation import layers_of
from outrider.verify.model.gpu.decoder import decoder_of
from outrider.verify.model.gpu.graphs import GraphedForward
from outrider.verify.model.gpu.paged_cache import PagePool
from outrider.verify.model.gpu.text_work import BLOCK, ROWS, SPLIT_KEYS, split_count
from outrider.verify.model.gpu.triton_experts import splits_of as splits_of_down
from outrider.verify.model.gpu.triton_products import splits_of
from outrider.verify.model.torch_runner import TorchRunner
from outrider.verify.sampling.acceptance import decide
from outrider.verify.sampling.topk import likeliest
from outrider.verify.sampling_params import SamplingParams

PRODUCTS = {"linear", "linear_residual", "matmul", "mm", "addmm", "bmm"}
# The kernels behind one operation of ours.
KERNELS = {"tree_attention": 3, "recurrent_scan": 1, "recurrent_convolution": 1, "likeliest_tokens": 2, "choose_tokens": 3}
KERNELS |= {"choose_experts": 1, "experts": 3, "embed": 1, "sum_paths": 1}
# These, too, are kernels of their own in code that torch.compile fuses.
UNFUSED = {"sort", "topk", "cumsum"}
# Operations that read as much of their first tensor as they return.
GATHERS = {"embedding", "embed", "index", "index_select", "gather"}


@dataclass(eq=False)
class Operation:
    """One operation that runs a kernel, with the bytes of its tensors by their storages."""

    name: str
    layer: int | None  # None = not compiled
    reads: dict[int, int]
    writes: dict[int, int]
    depth: int = 0  # kernels of their own before it in its layer, on the longest way

    @property
    def is_apart(self) -> bool:
        return self.layer is None or self.name in PRODUCTS | UNFUSED or self.name in KERNELS


class Recorder(Device):
    """Keeps the operations of a forward, and in which compiled layer they are."""

    def __init__(self, experts: float, context: int) -> None:
        """`experts` is the share of the experts' weights that is read; `context` is the length of the text in tokens."""
        super().__init__()
        self._experts, self._context = experts, context
        self._weights = set[int]()  # storages
        self.reset()

    def reset(self) -> None:
        self.counts = Counts()
        self.ran: list[Operation] = []
        self._layers: list[int | None] = [None]  # the modules that are running
        self._kept: list[torch.Tensor] = []  # so that no other storage gets its address

    def watch(self, model: PreTrainedModel) -> None:
        """Follows the layers that `compiled_layers` compiles."""
        self._weights = set(storages(list(model.parameters())))
        for number, module in enumerate(layers_of(model)):
            module.register_forward_pre_hook(partial(self._enter, number))
            module.register_forward_hook(self._leave)

    def _enter(self, number: int | None, *_: Any) -> None:
        self._layers.append(number)

    def _leave(self, *_: Any) -> None:
        self._layers.pop()

    def record(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        super().record(func, inputs, outputs)
        self._kept += inputs + outputs
        name = func.overloadpacket.__name__.removesuffix("_")
        sizes = [each.nbytes for each in inputs]
        if name in GATHERS:
            sizes = [min(size, outputs[0].nbytes) for size in sizes]
        reads, writes = dict(zip(storages(inputs), sizes, strict=True)), [each.nbytes for each in outputs]
        written = dict(zip(storages(outputs), writes, strict=True))
        self.ran.append(Operation(name, self._layers[-1], reads, written))
        if name in PRODUCTS:
            self._product(name, inputs, outputs)
        elif name == "tree_attention":
            self._attention(*inputs[:5])
        elif name == "experts" and self._weights:
            self._mixture(inputs, outputs[0])
        elif name in ("embed", "choose_experts"):
            self.counts.add("elementwise", sum(sizes) + sum(writes), KERNELS[name])
        elif name in KERNELS:
            self.counts.add("attention", sum(sizes) + sum(writes), KERNELS[name])

    def _product(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Products without weights are in the rotary embedding, and tiny."""
        stored = [each for each, storage in zip(inputs, storages(inputs), strict=True) if storage in self._weights]
        out, written = outputs[0], sum(each.nbytes for each in outputs)
        if not stored:
            self.counts.add("linear", written + sum(each.nbytes for each in inputs), 1)
            return
        weights = max(stored, key=torch.Tensor.numel)
        moved = written + sum(each.nbytes for each in inputs if each is not weights and each.is_floating_point())
        if name.startswith("linear") and (splits := splits_of(weights.shape[1], len(weights))) > 1:
            moved += 2 * splits * out.numel() * 4  # each part is written and read
        self.counts.add("linear", weights.nbytes + moved, 1)
        self.counts.weight_bytes += weights.nbytes
        self.counts.flops += 2 * out.numel() * weights.numel() / out.shape[-1]

    def _mixture(self, inputs: list[torch.Tensor], out: torch.Tensor) -> None:
        """A share of the experts' weights; and what each expert of a row makes, in two steps, which is written and read."""
        rows, index = inputs[:2]
        weights = [each for each, storage in zip(inputs, storages(inputs), strict=True) if storage in self._weights]
        gate_up, down = weights[:2]
        splits = splits_of_down(down.shape[1], rows.shape[1], index.shape[1])
        parts = index.numel() * (2 * down.shape[1] * rows.itemsize + 2 * splits * rows.shape[1] * 4)
        read = self._experts * sum(each.nbytes for each in weights)
        self.counts.add("linear", read + rows.nbytes + out.nbytes + parts, KERNELS["experts"] - (len(rows) == 1))
        self.counts.weight_bytes += read
        self.counts.flops += 2 * index.numel() * (gate_up.numel() + down.numel()) / (len(down) / rows.shape[1])

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *pool: torch.Tensor) -> None:
        """The text's keys and values; the new rows; each row's parts of the text, float32, which are written and read."""
        heads, rows, _ = query.shape
        text = self._context * key.shape[0] * sum(each.shape[-1] * each.itemsize for each in pool)
        parts = split_count(self._context // BLOCK * BLOCK, SPLIT_KEYS)
        own = 2 * (query.nbytes + key.nbytes + value.nbytes)  # queries and outputs are about alike
        self.counts.text_bytes += text
        written = 2 * rows * heads * parts * (value.shape[2] + 1) * 4
        self.counts.add("attention", text + own + written, KERNELS["tree_attention"])


def storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Keys that tell the tensors' memory apart."""
    return [each.untyped_storage()._cdata for each in tensors]


def kernels(operations: Sequence[Operation]) -> list[list[Operation]]:
    """The operations as torch.compile fuses them.

    Two operations of a compiled layer become one kernel if one uses what the other has written, and nothing between them is a
    kernel of its own.
    """
    readers, writer = readers_of(operations), dict[int, Operation]()
    groups = {each: [each] for each in operations}
    for each in operations:
        sources = [writer[storage] for storage in each.reads if storage in writer]
        sources = [source for source in sources if source.layer == each.layer]
        each.depth = max((source.depth + source.is_apart for source in sources), default=0)
        for source in sources:
            group = groups[source]
            if each.is_apart or source.is_apart or group is groups[each]:
                continue
            others = {reader for member in group for storage in member.writes for reader in readers.get(storage, ())}
            if source.depth == each.depth or others - set(group) == {each}:
                joined = group + groups[each]
                groups |= dict.fromkeys(joined, joined)
        writer |= dict.fromkeys(each.writes, each)
    return list({id(group): group for group in groups.values()}.values())


def readers_of(operations: Sequence[Operation]) -> dict[int, set[Operation]]:
    """The operations that read each storage."""
    readers: dict[int, set[Operation]] = {}
    for each in operations:
        for storage in each.reads:
            readers.setdefault(storage, set()).add(each)
    return readers


def fused_bytes(operations: Sequence[Operation]) -> Iterator[float]:
    """The bytes of each fused kernel, without products and our own: what comes from outside it, and what others read."""
    readers = readers_of(operations)
    for group in kernels(operations):
        if group[0].name in PRODUCTS or group[0].name in KERNELS:
            continue
        written = {storage: size for each in group for storage, size in each.writes.items()}
        read = {storage: size for each in group for storage, size in each.reads.items() if storage not in written}
        kept = [size for storage, size in written.items() if readers.get(storage, set()) - set(group)]
        yield sum(read.values()) + sum(kept)


def count_step(config: Any, nodes: int, context: int) -> Counts:
    """A greedy step in bfloat16 that verifies a draft of `nodes`, if any with feedback, after a text of `context` tokens.

    Rows are padded to the next captured number. Experts are read as if rows chose them evenly and independently.
    """
    rows = next(rows for rows in ROWS if rows > nodes)
    recorder = Recorder(share_of_experts(config, nodes + 1), context)
    with fake_cuda(recorder):
        runner = TorchRunner(fake_model(config), context, compile="off", started=False)
        groups = runner._attention_probe.groups
        run = decoder_of(runner.model, context) or partial(runner._run, keep=0)
        forward = GraphedForward(run, PagePool(runner.cache_shape, 1), context, groups)
        recorder.watch(runner.model)
        recorder.reset()
        forward._run(rows)
    counts = recorder.counts
    for nbytes in fused_bytes(recorder.ran):
        counts.add("elementwise", nbytes, 1)
    if (states := runner.cache_shape.recurrent) is not None:
        size = states.states * states.heads * states.key_dim * states.value_dim * 4
        counts.text_bytes += size
        counts.add("attention", 3 * size, 2)  # a scan reads them; the fold of a step's rows reads and writes them
    with fake_cuda() as device, without_events():
        logits = torch.empty(nodes + 1, runner.vocabulary, dtype=torch.bfloat16, device=CUDA)
        tree = chain(np.zeros(nodes, np.int32), np.ones(nodes, np.float32), Source.NONE)
        decide(SamplingParams(temperature=0), logits, tree, 0, likeliest(logits, FEEDBACK if nodes else 0))
    more = sum(count * (KERNELS.get(name.split(".")[1], 1) - 1) for name, count in device.operations.items())
    counts.add("sampling", device.bytes, device.launches + more)
    return counts


def share_of_experts(config: Any, rows: int) -> float:
    """The expected share of the experts that are chosen by at least one row."""
    experts = getattr(config, "num_experts", None)
    return 1.0 if experts is None else 1.0 - (1.0 - config.num_experts_per_tok / experts) ** rows


@contextmanager
def without_events() -> Iterator[None]:
    """Downloads inside need no driver."""
    with patch.object(torch.cuda, "Event"), patch.object(torch.cuda, "current_stream"):
        yield
