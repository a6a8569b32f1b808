"""A model's own sampling defaults, from its generation_config.json or its GGUF file.

Promises that no content of the file stops the server. Knows nothing about requests: `GenerationBody.sampling_params` applies
the defaults. `do_sample` is not read. It is a switch of transformers' `generate` that is false in every file without it, so
following it would make most models greedy; `"temperature": 0` states greedy decoding as a default.
"""

import logging
from typing import Any

from pydantic import ValidationError

from outrider.server.openai.fields import LLAMA_SERVER_DEFAULTS, NO_DEFAULTS, SamplingFields, first_given
from outrider.verify.checkpoint import DEFAULT_REVISION, GGUF, locate, read_json
from outrider.verify.gguf.metadata import read_metadata
from outrider.verify.hub import hub_errors, model_file, model_folder

FILE, GGUF_FILE = "generation_config.json", "the GGUF file"
# A GGUF file's names of the parameters, and their prefix.
PREFIX = "general.sampling."
GGUF_NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# The file's numbers have 32 bits, which are this many decimal digits.
DIGITS = 6
log = logging.getLogger("outrider")


def load_sampling_defaults(path: str, revision: str = DEFAULT_REVISION) -> SamplingFields:
    """The defaults of the model at `path`, a folder, a GGUF file or a hub id with a revision. Logs them.

    A value that a request may not have is left out; what cannot be used is one warning. What a GGUF file lacks has
    llama-server's default, because such files are made for it.
    """
    is_gguf = path.endswith(GGUF)
    given = read_valid(path, revision, GGUF_FILE if is_gguf else FILE)
    defaults = SamplingFields(**first_given(given, LLAMA_SERVER_DEFAULTS)) if is_gguf else given
    values = defaults.model_dump(exclude_none=True)
    if is_gguf and given == NO_DEFAULTS:
        log.info("requests without sampling parameters use llama-server's, as the GGUF file has none", extra={"fields": values})
    elif values:
        source = "those of the GGUF file, or else llama-server's" if is_gguf else f"those of {FILE}"
        log.info("requests without sampling parameters use %s", source, extra={"fields": values})
    return defaults


def read_valid(path: str, revision: str, name: str) -> SamplingFields:
    """The valid parameters that the model's file with this name in messages gives. Warns of the others."""
    try:
        given = read_gguf(path, revision) if path.endswith(GGUF) else read(path, revision)
    except hub_errors(RecursionError) as error:
        log.warning("%s is not used, because it cannot be read: %s", name, error)
        return NO_DEFAULTS
    try:
        return SamplingFields.model_validate(given)
    except ValidationError as error:
        invalid = {str(each["loc"][0]): each["msg"] for each in error.errors()}
        reasons = "; ".join(f"{field}: {reason}" for field, reason in invalid.items())
        log.warning("%s has invalid values, which are not used: %s", name, reasons)
        return SamplingFields.model_validate({field: value for field, value in given.items() if field not in invalid})


def read(path: str, revision: str) -> dict[str, Any]:
    """The content of the model's file; empty if there is none. Raises RecursionError, and one of `hub_errors`."""
    return read_json(str(model_folder(path, revision, (FILE,))), FILE, revision)


def read_gguf(path: str, revision: str) -> dict[str, Any]:
    """The parameters of a GGUF file by the names of requests' fields. Raises OSError and ValueError."""
    location = locate(path, revision)
    entries = read_metadata(model_file(location.source, str(location.gguf), revision)).entries
    found = {field: entries[f"{PREFIX}{name}"] for name, field in GGUF_NAMES.items() if f"{PREFIX}{name}" in entries}
    return {field: round(value, DIGITS) if isinstance(value, float) else value for field, value in found.items()}
