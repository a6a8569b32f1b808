"""Draft models and draft heads: loaded beside the target, and shared by all sessions. Heads compute with PyTorch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.drafters.model.pair import Pair
from outrider.server.settings import Settings
from outrider.verify.checkpoint import MTP
from outrider.verify.cost import CostCurve
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.draft_model.shared_ids import find_differences
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.findings import digest
from outrider.verify.heads.kinds import find_head
from outrider.verify.measurement import machine_key
from outrider.verify.model import backend
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.packages import TORCH, TRANSFORMERS, require
from outrider.verify.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from outrider.verify.heads.model import HeadModel

log = logging.getLogger("outrider.worker")


def load_draft(
    settings: Settings, options: LoadOptions, tokenizer: AnyTokenizer, runner: ModelRunner
) -> tuple[ModelRunner | HeadModel, Mapping[int, int]]:
    """The draft model or head of the settings, and its `find_differences`. Neither it nor the target's `runner` has started.

    Raises ModelError, also if a draft model does not split texts as the target does.
    """
    draft, target = settings.draft_model, settings.model
    if draft.path == MTP or find_head(options.path, options.revision) is not None:
        require("A draft head", TORCH, TRANSFORMERS)
        from outrider.verify.heads.loading import load_head

        revision = target.revision if draft.path == MTP else options.revision
        head = load_head(options.path, runner, revision, pack=target.backend != "torch")
        if head is not None:
            return head, {}
    differences = find_differences(tokenizer, load_tokenizer(options.path, options.trust_remote_code, options.revision))
    return backend.load(options), differences


def share_draft(
    draft: ModelRunner | HeadModel, differences: Mapping[int, int], target: ModelRunner, slots: int, pair: Pair
) -> DraftRunner:
    """The draft model or head for all sessions. Both models' steps are timed if the pair is not known yet."""
    if isinstance(draft, ModelRunner):
        shared = DraftRunner(draft, target.vocabulary, slots, differences=differences)
    else:
        from outrider.verify.heads.model import HeadRunner

        shared = HeadRunner(draft, slots)
    pair.block = shared.pair.block
    shared.pair = pair
    if not pair.draft_seconds:
        shared.measure(target)
    return shared


def load_pair(file: Path | None, curve: CostCurve | None) -> Pair:
    """What an earlier start has saved in a file; a new pair without one."""
    pair = Pair(costs=None if curve is None else curve.at)
    try:
        if file is not None:
            pair.load(json.loads(file.read_text()))
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        log.warning("%s does not describe a draft model (%s), so it is measured again.", file, error)
    return pair


def pair_file_of(target: ModelRunner, draft: ModelRunner | HeadModel, folder: Path | None) -> Path | None:
    """The file of what is known of a draft model beside its target on this machine."""
    own = machine_key(draft) if isinstance(draft, ModelRunner) else draft.description
    return folder and folder / f"{digest([machine_key(target), own])}-draft.json"
