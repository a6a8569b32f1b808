"""How many KV caches of which length the device's memory holds: fewer than wished for, then shorter ones, before a refusal.

On a GPU, the memory is a pool of pages that all caches share, so there may be more caches than full contexts fit.
Promises that settings with a value are respected or refused with a sentence. Knows nothing about devices or models, only
their figures.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.server.settings.tree import DEFAULT_MAX_ACTIVE
from outrider.verify.errors import ModelError
from outrider.verify.model.cache.kv_cache import MARGIN_POSITIONS, PAGE_TOKENS, page_count
from outrider.verify.model.cache.windows import held_positions

# A context is not shortened below this, because agents' prompts would no longer fit.
MIN_CONTEXT_TOKENS = 8192
# This share of the free memory is left for activations.
RESERVED_SHARE = 0.2
# A shortened context is a multiple of this, so that it is the same at the next start.
ROUNDED_TOKENS = 1024


@dataclass(frozen=True)
class MemoryFigures:
    free_bytes: int  # free memory after the weights are loaded
    token_bytes: int  # keys and values of one position, also those of a draft model on the same device
    model_tokens: int  # the longest context that the model supports
    reserved_share: float = RESERVED_SHARE  # share of the free memory left for activations
    slot_bytes: int = 0  # bytes that a cache has whether it is full or empty: of recurrent layers, and of hidden states
    device: str = "the device"  # device's name in messages
    is_lazy: bool = False  # a cache takes the memory of its text, as on a CPU; otherwise, caches are in pages
    # Pairs of a sliding window and of the part of `token_bytes` that belongs to layers with this window.
    windowed: Sequence[tuple[int, int]] = ()
    reserved_bytes: int | None = None  # what earlier starts have measured of activations, which counts if it is less

    @property
    def budget_bytes(self) -> int:
        """The bytes for KV caches."""
        free = max(0, self.free_bytes)
        share = int(free * (1 - self.reserved_share))
        return share if self.reserved_bytes is None else max(share, free - self.reserved_bytes)

    def cache_bytes(self, context_tokens: int) -> int:
        """The bytes of one KV cache: a context, and the margin beyond its end, in whole pages."""
        positions = self.step * page_count(context_tokens + MARGIN_POSITIONS, self.step)
        released = sum(bytes * (positions - held_positions(positions, window)) for window, bytes in self.windowed)
        return self.slot_bytes + self.token_bytes * positions - released

    def longest_context(self, slots: int) -> int:
        """The longest context up to the model's of which `slots` KV caches fit; 0 if none does."""
        return bisect_right(range(1, self.model_tokens + 1), self.budget_bytes // slots, key=self.cache_bytes)

    @property
    def step(self) -> int:
        """Positions by which a KV cache grows."""
        return 1 if self.is_lazy else PAGE_TOKENS

    def sharing(self, wished: int, full: int, context_tokens: int) -> int:
        """KV caches that share the pool, where `full` whole contexts must fit; each has states of its own."""
        if self.is_lazy:
            return 0
        left = self.budget_bytes - full * self.cache_bytes(context_tokens)
        return min(wished, full + left // self.slot_bytes) if self.slot_bytes else wished

    def pages(self, most: int, caches: int, context_tokens: int) -> int | None:
        """Pages of the pool that fit with `caches` KV caches' states, at most `most` full contexts; None without a pool."""
        if self.is_lazy:
            return None
        wished = most * page_count(context_tokens + MARGIN_POSITIONS, PAGE_TOKENS)
        if not self.token_bytes:  # without attention, pages take no memory
            return wished
        return min(wished, (self.budget_bytes - caches * self.slot_bytes) // (self.token_bytes * PAGE_TOKENS))


@dataclass(frozen=True)
class MemoryWishes:
    """The settings that need memory. None = fit."""

    context_tokens: int | None = None  # model.context_tokens
    slots: int | None = None  # sessions.slots
    max_active: int | None = None  # scheduling.max_active
    sessions: int = 8  # sessions.capacity

    def full_slots(self, is_lazy: bool) -> int:
        """The fewest KV caches that must fit with a whole context each."""
        return (self.max_active if is_lazy else self.slots) or 1

    @property
    def caches(self) -> int:
        """The most KV caches that are of use: for kept sessions and running requests."""
        return self.sessions + (self.max_active or DEFAULT_MAX_ACTIVE)


@dataclass(frozen=True)
class MemoryPlan:
    slots: int  # KV caches of a whole context that fit
    context_tokens: int
    note: str | None = None  # one sentence about what does not fit, and the setting that changes it
    caches: int = 0  # KV caches that share the pages; 0 without a pool
    pages: int | None = None  # pages of the pool; None without one

    @property
    def streams(self) -> int:
        return max(self.slots, self.caches)


def plan_memory(figures: MemoryFigures, wishes: MemoryWishes) -> MemoryPlan:
    """The KV caches that fit. Raises ModelError if the settings, or one context of MIN_CONTEXT_TOKENS, do not."""
    check_wishes(figures, wishes)
    context, required = wishes.context_tokens or figures.model_tokens, wishes.full_slots(figures.is_lazy)
    fitting = figures.budget_bytes // figures.cache_bytes(context)
    if fitting >= required:
        plan = plan_caches(figures, wishes, min(fitting, wishes.caches), context)
        served = plan.caches or plan.slots
        note = None if wishes.slots or served >= wishes.caches - wishes.sessions else fewer(figures, served, context)
        return replace(plan, note=note)
    shortened = figures.longest_context(required) // ROUNDED_TOKENS * ROUNDED_TOKENS
    if wishes.context_tokens is not None or shortened < min(MIN_CONTEXT_TOKENS, figures.model_tokens):
        raise ModelError(refusal(figures, wishes))
    return replace(plan_caches(figures, wishes, required, shortened), note=shorter(figures, required, shortened))


def plan_caches(figures: MemoryFigures, wishes: MemoryWishes, slots: int, context: int) -> MemoryPlan:
    """The plan for KV caches of `context` tokens, of which `slots` fit, unless the settings say how many."""
    caches = figures.sharing(wishes.caches, wishes.full_slots(figures.is_lazy), context)
    slots = wishes.slots or slots
    pages = figures.pages(wishes.slots or caches, max(slots, caches), context)
    if pages is not None and wishes.slots is None:  # the states of caches that share the pages take room, too
        slots = min(slots, pages // page_count(context + MARGIN_POSITIONS, PAGE_TOKENS))
    return MemoryPlan(slots, context, caches=caches, pages=pages)


def plan_devices(devices: Sequence[MemoryFigures], wishes: MemoryWishes) -> MemoryPlan:
    """The KV caches of a model over several devices: what fits on all of them. Raises ModelError as `plan_memory`."""
    plans = [plan_memory(each, wishes) for each in devices]
    slots, context = min(each.slots for each in plans), min(each.context_tokens for each in plans)
    notes = (each.note for each in plans if each.note and (each.slots, each.context_tokens) == (slots, context))
    pages = [each.pages for each in plans if each.pages is not None]
    return MemoryPlan(slots, context, next(notes, None), plans[0].caches, min(pages, default=None))


def check_wishes(figures: MemoryFigures, wishes: MemoryWishes) -> None:
    """Raises ModelError if settings contradict each other or the model."""
    if wishes.context_tokens is not None and wishes.context_tokens > figures.model_tokens:
        raise ModelError(
            f"model.context_tokens is {wishes.context_tokens}, but this model supports at most {figures.model_tokens} tokens;"
            " lower it, or leave it out."
        )
    if wishes.slots is not None and wishes.max_active is not None and wishes.slots < wishes.max_active:
        raise ModelError(
            f"scheduling.max_active is {wishes.max_active}, but sessions.slots allows only {wishes.slots} KV caches;"
            " lower scheduling.max_active, or raise sessions.slots."
        )


def fewer(figures: MemoryFigures, slots: int, context_tokens: int) -> str:
    """The note about fewer KV caches than requests may run by default."""
    requests = "one request runs" if slots == 1 else f"{slots} requests run"
    return (
        f"The memory of {figures.device} holds {caches(slots, context_tokens)}, so {requests} at a time; lower"
        " model.context_tokens to make room for more."
    )


def shorter(figures: MemoryFigures, slots: int, context_tokens: int) -> str:
    """The note about a shorter context than the model's."""
    needed, free = figures.cache_bytes(figures.model_tokens) * slots, figures.budget_bytes
    return (
        f"The model's context of {figures.model_tokens} tokens needs {size(needed)} for {slots} KV cache{plural(slots)}, and"
        f" {size(free)} are free, so the context has {context_tokens} tokens; set model.context_tokens to choose its length."
    )


def refusal(figures: MemoryFigures, wishes: MemoryWishes) -> str:
    """Why not even the least fits."""
    context = wishes.context_tokens or min(MIN_CONTEXT_TOKENS, figures.model_tokens)
    required = wishes.full_slots(figures.is_lazy)
    needed, free = figures.cache_bytes(context) * required, figures.budget_bytes
    settings = {"model.context_tokens": wishes.context_tokens, "sessions.slots": wishes.slots}
    settings["scheduling.max_active"] = wishes.max_active if figures.is_lazy and not wishes.slots else None
    given = " or ".join(name for name, value in settings.items() if value is not None)
    remedy = f"lower {given}, or serve" if given else "serve"
    return (
        f"{caches(required, context)} would need {size(needed)}, but {size(free)} of the memory of {figures.device} are free"
        f" for that after the weights; {remedy} a smaller or quantised model."
    )


def caches(slots: int, context_tokens: int) -> str:
    return f"{slots} KV cache{plural(slots)} of {context_tokens} tokens"


def plural(count: int) -> str:
    """The ending of a noun after a count."""
    return "" if count == 1 else "s"


def size(count: int) -> str:
    """A number of bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 100_000_000 else f"{count / 1e6:.1f} MB"
