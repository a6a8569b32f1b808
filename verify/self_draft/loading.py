"""Makes a started target its own draft model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outrider.verify.model.runner import ModelRunner
from outrider.verify.self_draft.layers import LayerSkipper
from outrider.verify.self_draft.search import LEAST_SPEED, Finding
from outrider.verify.self_draft.session import SelfRunner

log = logging.getLogger("outrider.worker")


def share_target(target: ModelRunner, skipped: Finding | Sequence[int], slots: int = 4, threads: int = 1) -> SelfRunner:
    """The target without some layers as a draft model, started and measured. Raises ModelError.

    With a finding, it drafts nothing if that is not expected to pay.
    """
    found, chosen = (skipped, skipped.skipped) if isinstance(skipped, Finding) else (None, skipped)
    runner = LayerSkipper(target).without(chosen)
    runner.start(target.context_tokens)
    shared = SelfRunner(runner, slots, threads)
    shared.measure(target)
    if found is not None:
        speed = found.speed(shared.speed_ratio)
        shared.drafts = speed >= LEAST_SPEED
        log.info(
            "self-speculation skips the layers %s, agrees on %.0f %% of the tokens and is expected to be %.2f times as fast%s",
            *(list(chosen), 100 * found.agreement[0], speed, "" if shared.drafts else ", so it drafts nothing"),
        )
    return shared
