"""Everything that a worker loads before it serves: model, tokenizer, tables, kernels and the machine's cost curve."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from drafters.interface import MAX_NODES
from drafters.registry import Resources
from server.settings import Settings
from server.worker.kernels import Kernels
from server.worker.resources import Tables, distinct, load_resources
from verify.cost import CostCurve, load_or_measure
from verify.draft_model import DraftRunner
from verify.errors import ModelError
from verify.grammar import GrammarCompiler
from verify.model.cache import slots_that_fit
from verify.model.loading import LoadOptions, load_model, stop_ids
from verify.model.runner import ModelRunner
from verify.tokenizer import check_pair, fingerprint, load_tokenizer

SMALL_MODEL_BYTES = 64_000_000


class Budget(TypedDict):
    """The fields of DecodeOptions that set the draft budget."""

    max_nodes: int
    curve: CostCurve | None


@dataclass
class Runtime:
    """Everything that a worker's requests share."""

    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    resources: Resources
    own_resources: dict[str, Resources]  # by principal, for those with their own datastores
    slots: int  # KV caches of a full context on the device
    grammars: GrammarCompiler
    curve: CostCurve | None  # None unless speculation.max_nodes is auto
    kernels: Kernels

    def resources_of(self, principal: str) -> Resources:
        """The drafters' resources for a principal's requests."""
        return self.own_resources.get(principal, self.resources)

    def budget(self, max_nodes: int | Literal["auto"]) -> Budget:
        """The draft budget of a request, as fields of DecodeOptions."""
        if max_nodes != "auto":
            return {"max_nodes": max_nodes, "curve": None}
        return {"max_nodes": MAX_NODES, "curve": self.curve}


def load(settings: Settings, kernels: Kernels | None = None) -> Runtime:
    """Loads everything that requests need. Raises ModelError or ArrayFileError with one sentence.

    Compiles the kernels that are not cached, unless `kernels` does so in the background.
    """
    disable_progress_bar()
    runner = load_target(settings)
    tokenizer = load_tokenizer(settings.model.path, settings.model.trust_remote_code)
    draft = load_draft(settings, tokenizer)
    slots = plan_slots(runner, draft, settings)
    model = None
    if draft is not None:
        shared_draft = DraftRunner(draft, runner.vocabulary, slots, settings.draft_model.threads)
        shared_draft.measure(runner)
        model = shared_draft.session
    curve = load_curve(runner, settings)
    tables = Tables(fingerprint(tokenizer), vocabulary=max(runner.vocabulary, len(tokenizer)) + 1)
    resources, own = load_resources(settings, tables, model)
    kernels = kernels or Kernels(settings, background=False)
    # After the measurements, which a concurrent compilation would disturb.
    kernels.load(distinct([resources, *own.values()]), tables)
    ends = stop_ids(runner.model, tokenizer)
    return Runtime(
        runner=runner,
        tokenizer=tokenizer,
        stop_ids=ends,
        resources=resources,
        own_resources=own,
        slots=slots,
        grammars=GrammarCompiler(tokenizer, runner.vocabulary, ends),
        curve=curve,
        kernels=kernels,
    )


def load_target(settings: Settings) -> ModelRunner:
    """The target model. Sets torch's thread count. Raises ModelError."""
    model = settings.model
    if checkpoint_bytes(model.path) < SMALL_MODEL_BYTES:
        torch.set_num_threads(1)  # while other processes start, a second thread slows loading down
    runner = load_model(
        LoadOptions(
            path=model.path,
            dtype=model.dtype,
            device=model.device,
            context_tokens=model.context_tokens,
            trust_remote_code=model.trust_remote_code,
            pack=model.pack,
            trace=model.trace,
            compile=model.compile,
        )
    )
    reserved = settings.draft_model.threads if settings.draft_model.path else 0
    torch.set_num_threads(model.threads or default_threads(runner, reserved))
    return runner


def load_draft(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> ModelRunner | None:
    """The draft model, if one is set. Raises ModelError if it does not share the target's tokenizer."""
    draft, target = settings.draft_model, settings.model
    if draft.path is None:
        return None
    check_pair(tokenizer, load_tokenizer(draft.path, draft.trust_remote_code))
    return load_model(
        LoadOptions(
            path=draft.path,
            dtype=draft.dtype,
            device=draft.device,
            context_tokens=target.context_tokens,
            trust_remote_code=draft.trust_remote_code,
            pack=target.pack,
            trace=target.trace,
            compile=target.compile,
        )
    )


def load_curve(runner: ModelRunner, settings: Settings) -> CostCurve | None:
    """The machine's cost curve, if speculation.max_nodes is auto."""
    if settings.speculation.max_nodes != "auto":
        return None
    folder = settings.speculation.cost_folder
    return load_or_measure(runner, folder and folder.expanduser())


def plan_slots(runner: ModelRunner, draft: ModelRunner | None, settings: Settings) -> int:
    """The number of KV caches on the device: sessions.slots, or as many as the sessions need and memory can hold.

    Raises ModelError if they are too few for scheduling.max_active.
    """
    min_slots = settings.scheduling.max_active
    draft_bytes = 0 if draft is None else draft.cache_shape.bytes_for(draft.context_tokens)
    fitting = slots_that_fit(runner.cache_shape, runner.context_tokens, draft_bytes)
    slots = settings.sessions.slots or min(fitting, settings.sessions.capacity + min_slots)
    if min(fitting, slots) < min_slots:
        size = runner.cache_shape.bytes_for(runner.context_tokens) / 1e9
        raise ModelError(
            f"{min_slots} concurrent requests need {min_slots} KV caches of {size:.1f} GB each, but {min(fitting, slots)} fit;"
            " lower model.context_tokens or scheduling.max_active, or raise sessions.slots."
        )
    return slots


def checkpoint_bytes(path: str) -> float:
    """The size of a local model's weight files; infinite for a hub id."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) or math.inf


def default_threads(runner: ModelRunner, reserved: int = 0) -> int:
    """All cores but the `reserved` ones of a draft model, which may run at the same time.

    Returns 1 for a small model: a second thread gains little, and the front end needs the core.
    """
    return 1 if runner.weight_bytes < SMALL_MODEL_BYTES else max(1, (os.cpu_count() or 1) - reserved)
