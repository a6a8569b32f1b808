"""How kernels of several GPUs hand numbers to each other, in memory that all of them write to.

Each GPU is a rank and has a mailbox: a flag of each rank, and two places for parts of sums. A rank publishes by storing its
part into all mailboxes, and then its number of exchanges so far, its epoch, into its flag there. Epochs only grow, so that
nothing is reset. Every rank then waits until all flags have reached its own epoch.

Two places, used in turn, suffice: who stores into a place for the exchange n + 2 has seen the flags of n + 1 of all ranks, and
a rank sets that flag after it has read all parts of n, for its kernels run one after the other.

Triton is an optional dependency: import this module lazily.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.verify.model.gpu.weight_kernels import HAS_PTX

# The numbers of 32 bits before a mailbox's parts: flags of 64 bits, which a server's lifetime does not exhaust.
FLAGS = tl.constexpr(64)
# What a rank keeps for itself: the number of programs that have stored their part, and its epoch.
STORED, EPOCH = tl.constexpr(0), tl.constexpr(1)


@triton.jit
def flag_of(mailboxes, owner, rank):
    """The address of a rank's flag in the mailbox of `owner`."""
    return tl.load(mailboxes + owner).to(tl.pointer_type(tl.int64)) + rank


@triton.jit
def epoch_of(state):
    """The exchanges that this rank has published; another multiprocessor has written the number."""
    return tl.load(state + EPOCH, volatile=True)


@triton.jit
def parts_of(mailboxes, owner, epoch, room):
    """The address of an epoch's parts, of up to `room` numbers, in the mailbox of `owner`."""
    parts = tl.load(mailboxes + owner).to(tl.pointer_type(tl.float32)) + FLAGS
    return tl.multiple_of(parts + (epoch % 2) * room, 16)


@triton.jit
def publish(mailboxes, state, rank, ranks: tl.constexpr):
    """Tells all ranks that this one's part is there, once all programs of the kernel have stored theirs."""
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(state + STORED, 1, sem="acq_rel", scope="sys") == programs - 1:
        epoch = epoch_of(state) + 1
        tl.atomic_xchg(state + STORED, 0)
        tl.store(state + EPOCH, epoch)
        for owner in tl.static_range(ranks):
            _raise_flag(flag_of(mailboxes, owner, rank), epoch)


@triton.jit
def _raise_flag(flag, epoch):
    """A store, since GPUs without NVLink have no atomic operations on another one's memory."""
    if HAS_PTX:
        store: tl.constexpr = "st.release.sys.global.u64 [$1], $2; mov.u32 $0, 0;"
        tl.inline_asm_elementwise(store, "=r,l,l", [flag, epoch], dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@triton.jit
def _flag(flag):
    if HAS_PTX:
        load: tl.constexpr = "ld.acquire.sys.global.u64 $0, [$1];"
        return tl.inline_asm_elementwise(load, "=l,l", [flag], dtype=tl.int64, is_pure=False, pack=1)
    else:
        return tl.atomic_add(flag, 0, sem="acquire", scope="sys")


@triton.jit
def await_all(mailboxes, state, rank, ranks: tl.constexpr):
    """Waits until all ranks have published as often as this one has; returns how often."""
    epoch = epoch_of(state)
    for other in tl.static_range(ranks):
        flag = flag_of(mailboxes, rank, other)
        seen = _flag(flag)
        while seen < epoch:
            seen = _flag(flag)
    tl.debug_barrier()
    return epoch
