"""The body of /infill, as llama-server's: the text around the cursor, and the fields of /completion."""

import time
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from outrider.server.chat.fill_in import ContextFile, FillInText
from outrider.server.openai import unsupported
from outrider.server.openai.fields import LLAMA_SERVER_DEFAULTS, MAX_PARTS, Body, SamplingFields, Strings, UntracedSpeculation
from outrider.server.openai.generation import Cut
from outrider.server.openai.schema import GenerationBody

# Other endpoints reject these fields.
ACCEPTED = ("t_max_predict_ms",)
UNSUPPORTED = {name: values for name, values in unsupported.UNSUPPORTED.items() if name not in ACCEPTED}
RANDOM_SEEDS = (-1, (1 << 32) - 1)


class ExtraFile(Body):
    """A file that is given as context, such as one that the editor has open."""

    text: str
    filename: str = "tmp"


class LineLimits:
    """llama-server's `n_indent` and `t_max_predict_ms`. Implements `outrider.server.openai.generation.Stop`."""

    def __init__(self, indent: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`indent`: least number of spaces and tabs that a line begins with, except the first; an empty line has none.

        `seconds`: time from the first text on; 0 = no limit.
        """
        self._indent = indent
        self._seconds = seconds
        self._clock = clock
        self._started: float | None = None
        # Spaces at the beginning of the current line; None after them, and in the first line.
        self._spaces: int | None = None

    def feed(self, text: str) -> Cut | None:
        now = self._clock()
        self._started = now if self._started is None else self._started
        is_late = 0 < self._seconds < now - self._started
        for at, character in enumerate(text):
            if self._spaces is not None and character in " \t":
                self._spaces += 1
                continue
            if self._spaces is not None and self._spaces < self._indent:
                return Cut(at, "length")
            if is_late and character == "\n":
                return Cut(at + 1, "length")
            self._spaces = 0 if character == "\n" else None
        return None


class InfillBody(GenerationBody):
    """POST /infill. Sampling has llama-server's defaults where the model has none."""

    unsupported = UNSUPPORTED
    api_defaults: ClassVar[SamplingFields] = LLAMA_SERVER_DEFAULTS

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    prompt: str | None = None  # the end of the prefix: the line with the cursor
    n_predict: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None  # -1 = up to the end of the context
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    speculation: UntracedSpeculation | None = None
    n_cmpl: Annotated[int, Field(ge=1)] | None = None  # llama-server's name of `n`
    id_slot: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None  # names a session
    return_tokens: bool | None = None
    response_fields: Strings | None = None
    n_indent: Annotated[int, Field(ge=0, le=1 << 31)] | None = None  # spaces and tabs
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=1 << 62)] | None = None  # 0 or less = no limit
    # These fields have no effect: prefixes are always kept, contexts are never shifted, and llama-server does not use the last
    # one either.
    cache_prompt: bool | None = None
    n_keep: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    t_max_prompt_ms: Annotated[int, Field(ge=-1, le=1 << 62)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_as_llama_server(cls, body: Any) -> Any:
        """Leaves out a seed that asks for a random one."""
        if not isinstance(body, dict) or body.get("seed") not in RANDOM_SEEDS:
            return body
        return {name: value for name, value in body.items() if name != "seed"}

    @property
    def text(self) -> FillInText:
        files = tuple(ContextFile(file.filename, file.text) for file in self.input_extra or ())
        return FillInText(self.input_prefix + (self.prompt or ""), self.input_suffix, files)

    @property
    def candidates(self) -> int:
        return self.n_cmpl or self.n or 1

    @property
    def session(self) -> str | None:
        """The name of the request's session: its own, or one for its slot; None if it names neither."""
        return self.session_id or (f"slot-{self.id_slot}" if self.id_slot is not None and self.id_slot >= 0 else None)

    def new_stop(self) -> LineLimits:
        """The limits that end the answer at a line."""
        return LineLimits(self.n_indent or 0, max(0, self.t_max_predict_ms or 0) / 1e3)

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.n_predict is None else self.predicted_tokens

    @property
    def num_logprobs(self) -> int | None:
        return None
