"""Everything that a worker loads before it serves: model, tokenizer, tables and the machine's cost curve."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from outrider.drafters.interface import Ints
from outrider.drafters.native.library import AVAILABLE
from outrider.drafters.registry import Resources
from outrider.server.chat.template.trial import load_tried_tokenizer
from outrider.server.chat.vocabulary import Vocabulary
from outrider.server.engine.messages import Memory
from outrider.server.http.body_budget import TOTAL_BYTES
from outrider.server.settings import DraftModel, Model, Settings
from outrider.server.settings.tree import DEFAULT_MAX_ACTIVE, RESPONSES_BYTES
from outrider.server.worker.activations import Activations
from outrider.server.worker.draft import load_draft, load_pair, pair_file_of, share_draft
from outrider.server.worker.memory_plan import RESERVED_SHARE, MemoryFigures, MemoryPlan, MemoryWishes, plan_devices
from outrider.server.worker.resources import MAX_PRINCIPALS, ClientCorpora, LearnedTexts, Stores, Tables, load_resources
from outrider.verify.checkpoint import SMALL_MODEL_BYTES, stored_bytes
from outrider.verify.constraints.grammar import GrammarCompiler
from outrider.verify.cost import CostCurve
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.findings import save_finding
from outrider.verify.measurement import cost_file, estimate, load_or_measure, machine_key
from outrider.verify.model import backend
from outrider.verify.model.cache.kv_cache import PAGE_TOKENS
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.memory import HOST, Device, free_bytes
from outrider.verify.model.runner import ModelRunner
from outrider.verify.start_times import timed
from outrider.verify.system_memory import own_bytes
from outrider.verify.tokenizer import fingerprint, stop_ids

if TYPE_CHECKING:
    from outrider.verify.heads.model import HeadModel
    from outrider.verify.model.adapter import Adapter

log = logging.getLogger("outrider.worker")
# Earlier sessions of a principal are kept up to this many tokens.
LEARNED_TOKENS = 1 << 15
# A token of a principal's earlier texts takes this much in the text itself, its index and their table.
LEARNED_TOKEN_BYTES = 16


@dataclass
class Runtime:
    """Everything that a worker's requests share."""

    runner: ModelRunner
    tokenizer: AnyTokenizer
    tokens: Vocabulary  # the tokenizer's vocabulary
    stop_ids: frozenset[int]
    resources: Resources
    own_resources: dict[str, Resources]  # resources of the principals with datastores of their own
    slots: int  # KV caches on the device
    max_active: int  # requests served concurrently
    grammars: GrammarCompiler
    curve: CostCurve | None  # None unless speculation.max_nodes is auto
    curve_file: Path | None = None
    pair_file: Path | None = None  # of what is known of the draft model; None without one
    corpora: ClientCorpora | None = None  # None if there are none
    learned: LearnedTexts | None = None  # None if sessions learn only from themselves
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # the target's, by name
    has_library: bool = AVAILABLE  # of the drafters; without it, only predictions are drafted
    activations: Activations = field(default_factory=lambda: Activations({}, None))
    timings: list[Callable[[], bool]] = field(default_factory=list)  # that are left for pauses

    def owner_of(self, principal: str, adapter: str | None) -> str:
        """Who owns a session: a principal's requests with an adapter share none with its others, nor what they learn."""
        return principal if adapter is None else f"{principal}\0{self.adapters[adapter].digest}"

    def resources_of(self, principal: str, adapter: str | None = None) -> Resources:
        resources = self.own_resources.get(principal, self.resources)
        if self.learned is None:
            return resources
        assert isinstance(resources.corpus, Stores)
        learned = self.learned.of(self.owner_of(principal, adapter))
        return replace(resources, corpus=replace(resources.corpus, learned=learned))

    def with_corpus(self, resources: Resources, file: str | None) -> Stores | None:
        """The corpora of `resources` with the chosen corpus of this file; None without a choice."""
        if file is None or self.corpora is None:
            return None
        assert isinstance(resources.corpus, Stores)
        return replace(resources.corpus, chosen=self.corpora.open(file))

    def learn(self, owner: str, session: Hashable, text: Ints) -> None:
        """Keeps the text (int32 [N]) of an owner's session for the drafts of its others."""
        if self.learned is not None:
            self.learned.of(owner).add(session, text)

    def budget(self, max_nodes: int | Literal["auto"]) -> tuple[int, CostCurve | None]:
        """The most draft nodes of a request's steps, and the costs that choose their number if that is `auto`."""
        most = self.runner.draft_nodes
        return (most, self.curve) if max_nodes == "auto" else (min(max_nodes, most), None)

    def measure_again(self) -> None:
        """Times the models once more, a part in each pause, until nothing is corrected: other work had disturbed the start."""
        if self.timings and not self.timings[-1]():
            self.timings.pop()

    def save_findings(self) -> None:
        """Saves what steps have shown for the next start: the cost curve, and what is known of the draft model and memory."""
        self.activations.observe(pool_bytes(self.runner))
        if self.pair_file is not None and self.resources.pair.is_corrected:
            save_finding(self.resources.pair.state(), self.pair_file)
            self.resources.pair.is_corrected = False
        if self.curve is not None and self.curve.is_corrected:
            save_finding(self.curve.state(), self.curve_file)
            self.curve.is_corrected = False


def load(settings: Settings) -> Runtime:
    """Loads everything that requests need. Raises ModelError or ArrayFileError with one sentence."""
    model = settings.model
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load_tried_tokenizer, settings)
        if model.trust_remote_code:
            wait([loading])  # both would write the same modules to transformers' cache
        with timed("loading the model"):
            runner = load_target(settings)
        tokenizer = loading.result()
    draft: ModelRunner | HeadModel | None = None
    differences: Mapping[int, int] = {}
    if settings.draft_model.path is not None:
        draft, differences = load_draft(settings, shared_options(settings, settings.draft_model), tokenizer, runner)
    activations = load_activations(runner, settings)
    slots = start_models(runner, draft, settings, tokenizer, activations)
    curve, timings = None, list[Callable[[], bool]]()
    if settings.speculation.max_nodes == "auto":
        with timed("finding the cost of steps"):
            curve = load_or_measure(runner, cost_folder(settings))
        if curve.is_estimated:
            timings.append(partial(time_again, curve, runner))
    shared_draft, pair_file, pair = None, None, None
    if draft is not None:
        pair_file = pair_file_of(runner, draft, cost_folder(settings))
        pair = load_pair(pair_file, curve)
        shared_draft = share_draft(draft, differences, runner, slots, pair)
        if not runner.in_pages:
            timings.append(partial(shared_draft.measure, runner))
    tables = Tables(lambda: fingerprint(tokenizer), vocabulary=max(runner.vocabulary, len(tokenizer)) + 1)
    resources, own = load_resources(settings, tables, None if shared_draft is None else shared_draft.session, pair)
    ends = stop_ids(runner.stop_tokens, tokenizer)
    return Runtime(
        runner=runner,
        tokenizer=tokenizer,
        tokens=Vocabulary(tokenizer),
        stop_ids=ends,
        resources=resources,
        own_resources=own,
        slots=slots,
        max_active=max_active(settings, slots, curve),
        grammars=GrammarCompiler(tokenizer, runner.vocabulary, ends),
        curve=curve,
        curve_file=cost_file(runner, cost_folder(settings)),
        pair_file=pair_file,
        activations=activations,
        corpora=ClientCorpora(tables) if settings.corpora.total_bytes else None,
        learned=LearnedTexts(LEARNED_TOKENS, tables.vocabulary) if settings.learns_from_sessions else None,
        timings=timings,
        adapters={name: backend.load_adapter(runner, path) for name, path in model.adapters.items()},
    )


def time_again(curve: CostCurve, runner: ModelRunner) -> bool:
    """Lowers an estimate by another one, once: steps correct the rest."""
    curve.lower(estimate(runner))
    return False


def load_target(settings: Settings) -> ModelRunner:
    """The target model, not started. Raises ModelError."""
    return backend.load(replace(shared_options(settings, settings.model), kv_dtype=settings.model.kv_dtype))


def shared_options(settings: Settings, model: Model | DraftModel) -> LoadOptions:
    """How the target or a draft model is loaded, as far as both have the same settings."""
    (path, revision), target = model.place, settings.model
    assert path is not None
    return LoadOptions(
        path=path,
        revision=revision,
        dtype=target.dtype,
        device=model.device,
        context_tokens=target.context_tokens,
        trust_remote_code=target.trust_remote_code,
        backend=target.backend if model is target else "torch" if target.backend == "torch" else "outrider",
        packed_folder=target.packed_folder,
        quantize=model.quantize,
        is_draft=model is not target,
    )


def start_models(
    runner: ModelRunner,
    draft: ModelRunner | HeadModel | None,
    settings: Settings,
    tokenizer: AnyTokenizer | None = None,
    activations: Activations | None = None,
) -> int:
    """Starts the models with the context that fits and with their threads. Returns the number of KV caches.

    Raises ModelError if the settings do not fit.
    """
    kept = settings.sessions
    wishes = MemoryWishes(settings.model.context_tokens, kept.slots, settings.scheduling.max_active, kept.capacity)
    plan = plan_devices(memory_figures(runner, draft, None, store_bytes(settings), activations), wishes)
    if plan.note:
        log.warning(plan.note)
    draft_plan = plan_draft(runner, draft, plan)
    runner.use_threads(settings.model.threads or default_threads(runner))
    folder = cost_folder(settings)
    finding = folder and folder / f"{machine_key(runner)}-rows.json"
    for each, pages in ((runner, plan.pages), (draft, draft_plan.pages)):
        if each is not None and each.in_pages:
            each.pages = pages
    backend.start(runner, settings.model.path, plan.context_tokens, settings.model.invariant, finding, tokenizer)
    if isinstance(draft, ModelRunner):
        draft.threads = default_threads(draft)
        backend.start(draft, str(settings.draft_model.path), draft_plan.context_tokens, tokenizer=tokenizer)
    elif draft is not None:
        draft.start(plan.context_tokens)
    return min(plan.streams, kept.slots or runner.most_caches)


def plan_draft(runner: ModelRunner, draft: ModelRunner | HeadModel | None, plan: MemoryPlan) -> MemoryPlan:
    """The KV caches of the draft model: the target's plan if they share a device, else what its own device holds.

    Raises ModelError if its device holds none.
    """
    if not isinstance(draft, ModelRunner) or str(draft.device) in device_names(runner):
        return plan
    tokens = min(draft.model_tokens, plan.context_tokens)
    own = plan_devices(memory_figures(draft, None, tokens), MemoryWishes(sessions=plan.streams))
    if own.context_tokens < tokens:
        log.warning(
            f"The memory of {draft.device} holds the draft model's KV cache for {own.context_tokens} tokens, so it drafts"
            " nothing in longer texts; lower model.context_tokens, or use a device with more memory."
        )
    return own


def load_activations(runner: ModelRunner, settings: Settings) -> Activations:
    """What activations have taken of the GPUs of a model whose weights are loaded."""
    folder = cost_folder(settings)
    file = folder and folder / f"{machine_key(runner)}-memory.json"
    return Activations({name: device for name, device in device_names(runner).items() if device.type == "cuda"}, file)


def pool_bytes(runner: ModelRunner) -> dict[str, int]:
    """The bytes of the pages on each device."""
    positions = (runner.pages or 0) * PAGE_TOKENS
    return {str(part.device): part.bytes_for(1) * positions for part in runner.cache_shape.parts}


def memory_figures(
    runner: ModelRunner,
    draft: ModelRunner | HeadModel | None,
    model_tokens: int | None = None,
    stores: int = 0,
    activations: Activations | None = None,
) -> list[MemoryFigures]:
    """The memory of each device of a model after its weights. The draft model's caches may be on one of the devices.

    The longest context is the model's unless `model_tokens` is given. On a CPU, `stores` bytes are reserved.
    """
    models = [runner] if draft is None else [runner, draft]
    shapes = [part for model in models for part in model.cache_shape.parts]
    found = []
    for name, device in device_names(runner).items():
        shared = [shape for shape in shapes if str(shape.device) == name]
        found.append(
            MemoryFigures(
                free_bytes=free_bytes(device) - (stores if device.type == "cpu" else 0),
                token_bytes=sum(shape.bytes_for(1) for shape in shared),
                model_tokens=model_tokens or runner.model_tokens,
                slot_bytes=sum(shape.slot_bytes for shape in shared),
                device=name,
                is_lazy=not runner.in_pages,
                reserved_bytes=None if activations is None else activations.reserved(name),
                windowed=[(each.window, each.windowed_bytes_for(1)) for each in shared if each.window and each.releases],
            )
        )
    return found


def device_names(runner: ModelRunner) -> dict[str, Device]:
    return {str(part.device): part.device for part in runner.cache_shape.parts}


def memory_bytes(settings: Settings) -> int:
    """The host's memory for the rows of all sessions: the budget of the KV caches of a model on a CPU."""
    return int((1 - RESERVED_SHARE) * max(0, free_bytes(HOST) - store_bytes(settings)))


def store_bytes(settings: Settings) -> int:
    """The memory that stored responses, corpora, bodies and earlier sessions' texts take when they are full."""
    principals = len(settings.auth.keys) + 1 if settings.auth.keys else MAX_PRINCIPALS
    learned = principals * LEARNED_TOKENS * LEARNED_TOKEN_BYTES if settings.learns_from_sessions else 0
    return RESPONSES_BYTES + settings.corpora.total_bytes + TOTAL_BYTES + learned


def max_active(settings: Settings, slots: int, curve: CostCurve | None) -> int:
    """The number of requests served concurrently: as set, or the number that pays on this machine, at most one per KV cache."""
    chosen = settings.scheduling.max_active
    if chosen is not None:
        return chosen
    return min(slots, DEFAULT_MAX_ACTIVE if curve is None else curve.streams_worth_running(DEFAULT_MAX_ACTIVE))


def memory_of(runtime: Runtime, settings: Settings, slot_bytes: int) -> Memory:
    runner, own, caches = runtime.runner, own_bytes(), runtime.slots * slot_bytes
    on_host = runner.device.type == "cpu"
    rest = None if own is None else max(0, own - runner.held_bytes * (on_host and not runner.maps_weights))
    return Memory(
        file=stored_bytes(settings.model.path),
        weights=runner.held_bytes,
        caches=min(caches, memory_bytes(settings)) if on_host else caches,
        rest=rest,
    )


def cost_folder(settings: Settings) -> Path | None:
    """The folder of what was measured on this machine."""
    folder = settings.speculation.cost_folder
    return folder and folder.expanduser()


def default_threads(runner: ModelRunner) -> int:
    """All cores; 1 for a small model: a second thread gains little, and the front end needs the core."""
    return 1 if runner.weight_bytes < SMALL_MODEL_BYTES else os.cpu_count() or 1
