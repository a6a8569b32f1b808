"""What crosses between the front end and the worker process: frozen structs, encoded with msgpack.

Promises that nothing executable crosses (no pickle). Knows nothing about HTTP or models.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from drafters.options import DrafterName
from verify.sampling_params import SamplingParams

Finish = Literal["stop", "length"]


class Request(msgspec.Struct, frozen=True, tag=True):
    """One request for `choices` answers to one prompt."""

    id: str
    prompt: list[int]  # token ids
    params: SamplingParams
    max_tokens: int  # per choice; none where the prompt alone is of interest
    stop: tuple[str, ...] = ()
    choices: int = 1
    session: str | None = None  # None = nothing is kept
    drafter: DrafterName | None = None  # None = the configured one
    max_nodes: int | None = None
    principal: str = ""  # whose key it came with; sessions and datastores are theirs
    prediction: list[int] = []  # token ids that the client expects to read
    stop_token_ids: list[int] = []  # beside the model's own
    skip_special_tokens: bool = True  # in the text
    priority: int = 0  # in the queue; lower comes first
    grammar: str | None = None  # that the answer follows, as llguidance writes it down
    keep_stop: bool = False  # the text ends with the stop string or token, not before it
    scores_prompt: bool = False  # log-probabilities of the prompt's tokens, too


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    id: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """The worker shall end."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has loaded its model and warmed its kernels."""

    context_tokens: int
    device: str
    dtype: str
    seconds: float  # since the process started
    slots: int  # contexts that the device holds at once
    slot_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start; `message` is one sentence for the owner."""

    message: str


class StepReport(msgspec.Struct, frozen=True):
    """What one decoding step cost and brought; sources and positions are counted, never text."""

    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    drafted: dict[str, int]  # nodes by source
    accepted: dict[str, int]  # accepted nodes by source


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Of the target's distribution before any sampling rule, at each of an event's tokens."""

    chosen: list[float]  # the token's own
    ids: list[list[int]]  # the likeliest ones, the likeliest first
    values: list[list[float]]


class TokenEvent(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one choice, and the text that they complete."""

    id: str
    choice: int
    tokens: list[int]
    text: str
    finish: Finish | None = None
    step: StepReport | None = None  # None while the prompt is read
    cached_tokens: int = 0  # prompt tokens that the session held already
    last: bool = False  # of the whole request
    logprobs: TokenLogprobs | None = None  # where the request asks
    prompt_logprobs: TokenLogprobs | None = None  # with a choice's first tokens: of the prompt's, but for the first


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended with an error; `message` may be shown to the client."""

    id: str
    message: str
    wrong: bool = False  # the request is to blame, not the server


class Status(msgspec.Struct, frozen=True, tag=True):
    """The worker's gauges."""

    sessions: int
    kv_cache_usage_ratio: float


ToWorker = Request | Cancel | Shutdown
FromWorker = Ready | Refused | TokenEvent | Failed | Status

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
