"""What a worker loads before it serves: model, tokenizer, tables, compiled kernels and the machine's cost curve."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import models
from drafters.interface import MAX_NODES
from drafters.options import DrafterName, Options
from drafters.registry import Resources, warm
from drafters.tables import datastore, ngram
from drafters.tables.array_file import ArrayFileError
from drafters.tables.suffix import Corpus
from server.settings import Settings
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
    """The part of DecodeOptions that says how much is drafted."""

    max_nodes: int
    curve: CostCurve | None


@dataclass
class Runtime:
    """Everything that a worker's requests share."""

    runner: ModelRunner
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    resources: Resources
    own_resources: dict[str, Resources]  # of the principals that have datastores of their own
    slots: int  # contexts that the device holds at once
    grammars: GrammarCompiler
    curve: CostCurve | None  # where the settings leave the nodes of a step to it

    def resources_of(self, principal: str) -> Resources:
        """What the drafters of a principal's requests read."""
        return self.own_resources.get(principal, self.resources)

    def budget(self, drafter: DrafterName, max_nodes: int | Literal["auto"]) -> Budget:
        """How many nodes a step may have, as DecodeOptions take it."""
        if max_nodes != "auto":
            return {"max_nodes": max_nodes, "curve": None}
        # Lookahead's window is no guess: its nodes are there for what the target says of them.
        return {"max_nodes": MAX_NODES, "curve": None if drafter == "lookahead" else self.curve}


def load(settings: Settings) -> Runtime:
    """Loads model, tokenizer and tables and warms the kernels. Raises ModelError or ArrayFileError with one sentence."""
    chosen = settings.model
    disable_progress_bar()
    options = LoadOptions(
        *(chosen.path, chosen.dtype, chosen.device, chosen.context_tokens, chosen.trust_remote_code),
        *(chosen.pack, chosen.trace, chosen.compile),
    )
    runner = load_model(options)
    beside = settings.draft_model.threads if settings.draft_model.path else 0
    torch.set_num_threads(chosen.threads or default_threads(runner, beside))
    tokenizer = load_tokenizer(chosen.path, chosen.trust_remote_code)
    draft = load_draft(settings, tokenizer)
    slots = plan_slots(runner, draft, settings)
    vocabulary = max(runner.vocabulary, len(tokenizer)) + 1
    mark = fingerprint(tokenizer)
    resources = load_resources(settings.speculation.options, mark, vocabulary)
    if draft is not None:
        shared = DraftRunner(draft, runner.vocabulary, slots, settings.draft_model.threads)
        shared.measure(runner)
        resources = replace(resources, model=shared.session)
    own = {
        name: replace(resources, corpus=[*resources.corpus, *load_corpus(key.datastores, mark)])
        for name, key in settings.auth.keys.items()
        if key.datastores
    }
    for each in {len(each.corpus): each for each in (resources, *own.values())}.values():
        warm(each)  # kernels are compiled for a number of blocks
    folder = settings.speculation.cost_folder
    measured = settings.speculation.max_nodes == "auto"
    curve = load_or_measure(runner, folder and folder.expanduser()) if measured else None
    ends = stop_ids(runner.model, tokenizer)
    grammars = GrammarCompiler(tokenizer, runner.vocabulary, ends)
    return Runtime(runner, tokenizer, ends, resources, own, slots, grammars, curve)


def load_draft(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> ModelRunner | None:
    """The draft model, where there is one. Raises ModelError where it does not go with the target's tokenizer."""
    chosen = settings.draft_model
    if chosen.path is None:
        return None
    check_pair(tokenizer, load_tokenizer(chosen.path, chosen.trust_remote_code))
    target = settings.model
    return load_model(
        LoadOptions(
            *(chosen.path, chosen.dtype, chosen.device, target.context_tokens, chosen.trust_remote_code),
            *(target.pack, target.trace, target.compile),
        )
    )


def plan_slots(runner: ModelRunner, draft: ModelRunner | None, settings: Settings) -> int:
    """How many contexts the device holds: the settings' number, else what sessions need and memory has. Raises ModelError."""
    least = settings.scheduling.max_active
    beside = 0 if draft is None else draft.cache_shape.bytes_for(draft.context_tokens)
    fitting = slots_that_fit(runner.cache_shape, runner.context_tokens, beside)
    wanted = settings.sessions.slots or min(fitting, settings.sessions.capacity + least)
    if min(fitting, wanted) < least:
        size = runner.cache_shape.bytes_for(runner.context_tokens) / 1e9
        raise ModelError(
            f"{least} requests at once need {least} contexts of {size:.1f} GB each, but {min(fitting, wanted)} fit;"
            " lower model.context_tokens or scheduling.max_active, or raise sessions.slots."
        )
    return wanted


def default_threads(runner: ModelRunner, beside: int = 0) -> int:
    """All cores but those of the draft model, which may run at the same time.

    One for a small model: its forwards gain little from a second, and the front end needs it more.
    """
    return 1 if runner.weight_bytes < SMALL_MODEL_BYTES else max(1, (os.cpu_count() or 1) - beside)


def load_resources(options: Options, tokenizer_fingerprint: str, vocabulary: int) -> Resources:
    """Maps the tables that drafters read. Raises ArrayFileError with one sentence."""
    corpus = load_corpus(options.retrieval.datastores, tokenizer_fingerprint)
    try:
        table = options.trigram.table
        base = ngram.load(models.BASE_TABLE if table is None else Path(table), tokenizer_fingerprint)
    except ArrayFileError:
        if table is not None:
            raise
        base = ngram.empty_base()  # the embedded table belongs to the embedded tokenizer only
    return Resources(options, base, corpus, vocabulary)


def load_corpus(datastores: Iterable[str], tokenizer_fingerprint: str) -> list[Corpus]:
    """Maps all blocks of the datastores at these paths. Raises ArrayFileError with one sentence."""
    return [block for folder in datastores for block in datastore.load(Path(folder), tokenizer_fingerprint)]
