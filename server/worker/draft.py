"""Draft models and draft heads: loaded beside the target, and shared by all sessions. They compute with PyTorch."""

from __future__ import annotations

from outrider.server.settings import Settings
from outrider.verify.checkpoint import MTP
from outrider.verify.draft_model.runner import DraftRunner
from outrider.verify.fast_tokenizer import AnyTokenizer
from outrider.verify.heads.draft import HeadRunner
from outrider.verify.heads.loading import load_head
from outrider.verify.heads.model import HeadModel
from outrider.verify.model import backend
from outrider.verify.model.load_options import LoadOptions
from outrider.verify.model.runner import ModelRunner
from outrider.verify.tokenizer import check_pair, load_tokenizer


def load_draft(
    settings: Settings, options: LoadOptions, tokenizer: AnyTokenizer, runner: ModelRunner
) -> ModelRunner | HeadModel:
    """The draft model or draft head of the settings. Neither it nor the target's `runner` has started.

    Raises ModelError, also if a draft model does not share the target's tokenizer.
    """
    draft, target = settings.draft_model, settings.model
    revision = target.revision if draft.path == MTP else draft.revision
    head = load_head(options.path, runner, revision, pack=target.backend != "torch")
    if head is not None:
        return head
    check_pair(tokenizer, load_tokenizer(options.path, draft.trust_remote_code, draft.revision))
    return backend.load(options)


def share_draft(draft: ModelRunner | HeadModel, vocabulary: int, slots: int, threads: int) -> DraftRunner:
    """The draft model or head for all sessions."""
    if isinstance(draft, HeadModel):
        return HeadRunner(draft, slots, threads)
    return DraftRunner(draft, vocabulary, slots, threads)
