"""A model's own sampling defaults, from its generation_config.json.

Promises that no content of the file stops the server. Knows nothing about requests: `GenerationBody.sampling_params` applies
the defaults. `do_sample` is not read. It is a switch of transformers' `generate` that is false in every file without it, so
following it would make most models greedy; `"temperature": 0` states greedy decoding as a default.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from transformers.utils import cached_file

from outrider.server.openai.fields import NO_DEFAULTS, SamplingFields
from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF
from outrider.verify.hub import hub_errors

FILE = "generation_config.json"
log = logging.getLogger("outrider")


def load_sampling_defaults(path: str, revision: str = DEFAULT_REVISION) -> SamplingFields:
    """The defaults of the model at `path`, a folder or a hub id with a revision. Logs them.

    A value that a request may not have is left out; what cannot be used is one warning.
    """
    try:
        given = read(path, revision)
    except hub_errors(RecursionError) as error:
        log.warning("%s is not used, because it cannot be read: %s", FILE, error)
        return NO_DEFAULTS
    try:
        defaults = SamplingFields.model_validate(given)
    except ValidationError as error:
        invalid = {str(each["loc"][0]): each["msg"] for each in error.errors()}
        reasons = "; ".join(f"{name}: {reason}" for name, reason in invalid.items())
        log.warning("%s has invalid values, which are not used: %s", FILE, reasons)
        defaults = SamplingFields.model_validate({name: value for name, value in given.items() if name not in invalid})
    values = defaults.model_dump(exclude_none=True)
    if values:
        log.info("requests without sampling parameters use those of %s", FILE, extra={"fields": values})
    return defaults


def read(path: str, revision: str) -> dict[str, Any]:
    """The content of the model's file; empty if there is none. Raises RecursionError, and one of `hub_errors`."""
    if path.endswith(GGUF):
        return {}  # these files hold no defaults
    file = cached_file(path, FILE, revision=revision, _raise_exceptions_for_missing_entries=False)
    given = {} if file is None else json.loads(Path(file).read_bytes())
    if not isinstance(given, dict):
        raise ValueError("it is not a JSON object")
    return given
