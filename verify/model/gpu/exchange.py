"""What the ranks of a split model exchange: parts of sums, which each adds in the order of splits, and the logits.

So sums have the bits that one GPU computes. Triton is an optional dependency: import this module lazily.
"""

from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import torch
import triton

from outrider.verify.model.gpu import exchange_kernels
from outrider.verify.model.gpu import product_kernels as kernels
from outrider.verify.model.gpu.triton_products import Weights, multiply, overlap, states_like
from outrider.verify.model.transfer import on_device

# The rows and columns that a program adds.
ADDED_ROWS, ADDED_OUTPUTS = 4, 64


class Exchange(NamedTuple):
    """What a rank's operations take."""

    mailbox: torch.Tensor  # float32, of this rank; flags are int64
    mailboxes: torch.Tensor  # int64 [ranks + 1]: addresses of all ranks' mailboxes, and of the logits
    state: torch.Tensor  # int64 [2]
    rank: int


def exchanges(devices: Sequence[torch.device], room: int, logits: torch.Tensor) -> list[Exchange]:
    """The exchange of each rank, for parts of up to `room` numbers, and for the logits, which are on the first one."""
    flags = exchange_kernels.FLAGS.value
    mailboxes = [torch.empty(flags + 2 * room, dtype=torch.float32, device=device) for device in devices]
    for each in mailboxes:
        each[:flags] = 0
    for device, other in permutations(devices, 2):
        # After a copy, later kernels of the device may write there, and find flags that are zero.
        mailboxes[devices.index(other)][:1].to(device)
    addresses = torch.tensor([each.data_ptr() for each in (*mailboxes, logits)])
    return [
        Exchange(box, addresses.to(device), torch.zeros(2, dtype=torch.int64, device=device), rank)
        for rank, (device, box) in enumerate(zip(devices, mailboxes, strict=True))
    ]


@torch.library.custom_op("outrider::publish", mutates_args=("mailbox",))
def publish(
    rows: torch.Tensor,
    values: torch.Tensor,
    scales: torch.Tensor | None,
    minimums: torch.Tensor | None,
    factors: torch.Tensor | None,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    split: int,
    mailbox: torch.Tensor,
    mailboxes: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    first: int,
    room: int,
    sums: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> None:
    """Sends the parts of rows' outputs, [N, outputs], whose inputs this rank has, to all ranks, in places of `room` numbers.

    `first` is the first of its splits. With `sums`, as in `linear`, these are the rank's logits instead, from output `first`
    on, of `room` ones.
    """
    weights = Weights(values, scales, minimums, factors, bias, arrived, split)
    epilogue = kernels.PARTS if sums is None else kernels.LOGITS
    others = {"mailboxes": mailboxes, "state": state, "rank": rank, "ranks": len(mailboxes) - 1, "first": first, "room": room}
    multiply(rows, weights, rows, epilogue.value, sums=sums, epsilon=epsilon, **others)


@torch.library.custom_op("outrider::add_parts", mutates_args=())
def add_parts(
    residual: torch.Tensor,
    gain: torch.Tensor,
    bias: torch.Tensor | None,
    mailbox: torch.Tensor,
    mailboxes: torch.Tensor,
    state: torch.Tensor,
    rank: int,
    splits: int,
    room: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The residual plus the parts of all ranks, `splits` in all, once they are there; as `linear_residual` returns it."""
    count, outputs = residual.shape
    found = states_like(residual)
    with on_device(residual.device):
        kernels.add_parts[triton.cdiv(outputs, ADDED_OUTPUTS), triton.cdiv(count, ADDED_ROWS)](
            mailboxes=mailboxes,
            state=state,
            rank=rank,
            room=room,
            bias=residual if bias is None else bias,
            residual=residual,
            gain=gain,
            out=found[0],
            gained=found[1],
            next_sums=found[2],
            count=count,
            outputs=outputs,
            ranks=len(mailboxes) - 1,
            splits=splits,
            has_bias=bias is not None,
            block_rows=ADDED_ROWS,
            block_outputs=ADDED_OUTPUTS,
            **overlap(residual.device),
        )
    return found


@add_parts.register_fake
def _(residual: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return states_like(residual)


@torch.library.custom_op("outrider::await_ranks", mutates_args=("mailbox",))
def await_ranks(mailbox: torch.Tensor, mailboxes: torch.Tensor, state: torch.Tensor, rank: int) -> None:
    """Lets later kernels see what all ranks have published."""
    with on_device(mailbox.device):
        kernels.await_ranks[(1,)](
            mailboxes=mailboxes, state=state, rank=rank, ranks=len(mailboxes) - 1, **overlap(mailbox.device)
        )


def begin_again(ranks: Sequence[Exchange]) -> None:
    """Forgets what a forward that was interrupted has published."""
    synchronize(ranks)
    for each in ranks:
        each.state.zero_()
        each.mailbox[: exchange_kernels.FLAGS.value] = 0
    synchronize(ranks)


def synchronize(ranks: Sequence[Exchange]) -> None:
    for each in ranks:
        if each.mailbox.device.type == "cuda":
            torch.cuda.synchronize(each.mailbox.device)
