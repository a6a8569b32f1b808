"""Messages between the front end and the worker: frozen structs, encoded with msgpack.

Promises that no message can hold code (no pickle). Knows nothing about HTTP or models.
"""

from typing import Any, ClassVar, Literal

import msgspec

from outrider.drafters.options import DrafterName
from outrider.drafters.sequence import Finish
from outrider.verify.sampling_params import ReasoningLimit, SamplingParams

Reuse = Literal["new", "continued", "forked"]  # how a request came by its session


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker."""

    settings: dict[str, Any]  # Settings as plain data, with the API keys masked
    started_at: float  # time.monotonic() of the process's start


class Array(msgspec.Struct, frozen=True):
    """An argument of the model's forward, such as pixel_values."""

    dtype: str  # as numpy names it
    shape: tuple[int, ...]
    data: bytes


class PictureInput(msgspec.Struct, frozen=True):
    start: int  # position of its first token
    tokens: list[int]  # from its first token of pixels to its last one; the prompt has a digest's tokens in their place
    arrays: dict[str, Array]


class Request(msgspec.Struct, frozen=True, tag=True):
    """One request: one answer to one prompt."""

    id: str
    prompt: list[int]  # token ids
    params: SamplingParams
    max_tokens: int  # 0 only scores the prompt
    stop: tuple[str, ...] = ()
    session: str | None = None  # None = the request leaves no state
    temporary: bool = False  # the session ends with the HTTP request, by a Forget message
    drafter: DrafterName | None = None  # None = the configured one
    max_nodes: int | None = None  # None = the configured number
    principal: str = ""  # the API key's name, which owns the session and the key's datastores
    corpus: str | None = None  # the file of the corpus that its drafts may use
    prediction: list[int] = []  # token ids of the client's predicted output
    stop_token_ids: list[int] = []  # ids of further stop tokens, in addition to the model's own
    skip_special_tokens: bool = True  # leave special tokens out of the text
    shown_tokens: list[int] = []  # special tokens that stay in the text all the same
    continues_prompt: bool = True  # the text continues the prompt's, so it keeps a space in front
    priority: int = 0  # priority in the queue; lower runs first
    grammar: str | None = None  # grammar of the answer, in llguidance's format
    open_ended: bool = False  # the answer ends where the grammar may end and the model leaves it
    keep_stop: bool = False  # the text includes the stop string or token
    wants_prompt_logprobs: bool = False  # return log-probabilities of the prompt's tokens
    reasoning: ReasoningLimit | None = None  # None = no limit
    trace: bool = False  # report the draft of each step
    adapter: str | None = None  # the name of the target's LoRA adapter
    pictures: list[PictureInput] = []  # in the prompt, in its order
    affinity: str = ""  # requests with equal values go to one replica of a cluster


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Cancels a request whose answer is no longer read."""

    id: str


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Interrupts a request between two steps, until its Resume."""

    id: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Continues a paused request."""

    id: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Drops a session that no request uses any more."""

    principal: str
    session: str
    adapter: str | None = None


# After a Shutdown message, a worker has this time to save its sessions.
SAVE_SECONDS = 20.0


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the worker process, after it has saved its sessions."""


class Memory(msgspec.Struct, frozen=True):
    """The memory of a model, in bytes."""

    file: int | None  # of its weights on the disk; None where they are not looked for
    weights: int
    caches: int  # at most, when all slots are full
    rest: int | None  # of the worker, without caches; None where the system does not tell

    def __str__(self) -> str:
        parts = {"file": self.file, "weights": self.weights, "caches up to": self.caches, "rest": self.rest}
        return ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in parts.items() if size is not None)


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker has loaded its model and serves requests."""

    context_tokens: int
    device: str
    dtype: str
    seconds: float  # time since the process's start
    slots: int  # KV caches of a full context on the device
    slot_bytes: int
    max_active: int  # requests served concurrently
    invariance: str  # whether logits have the same bits in every step, and why
    weight_bits: float  # mean bits of a weight that a step reads
    kv_dtype: str  # data type of cached keys and values
    memory: Memory
    kernels: str = ""  # those that were chosen for this CPU; empty on a GPU
    reads_pictures: bool = False  # whether prompts may have pictures
    alone: str = ""  # as of the latest `Status`


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The worker cannot start; `message` is one sentence for the owner."""

    message: str


class StepTrace(msgspec.Struct, frozen=True):
    """The draft that one step verified, at most MAX_NODES nodes, and its outcome."""

    tokens: list[int]
    parents: list[int]  # row of the parent, -1 = the last token before the step
    probability: list[float]  # estimated probability that the whole path to the node is accepted
    sources: list[str]  # labels
    accepted: list[int]  # rows of the accepted nodes, in the order of the text
    bonus: int | None  # the token after them; None if the answer ends before it
    proposed: int  # nodes that the drafter proposed
    expected: float | None  # tokens that the step was expected to emit; None if its nodes were not chosen by their cost
    gain: float  # expected tokens per second, over those without a draft


class StepReport(msgspec.Struct, frozen=True):
    """Times and counts of one step, and its draft if the request asks for it."""

    draft_seconds: float
    verify_seconds: float
    commit_seconds: float
    drafted: dict[str, int]  # verified draft nodes by source
    accepted: dict[str, int]  # accepted draft nodes by source
    trace: StepTrace | None = None  # if requested


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities under the target's distribution, before any sampling rule; one entry per token."""

    chosen: list[float]  # log-probabilities of the tokens themselves
    ids: list[list[int]]  # the top tokens, most likely first
    values: list[list[float]]  # log-probabilities of the top tokens


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The worker has a request and will answer it: it has checked what a client can fix."""

    id: str
    finish: ClassVar[None] = None  # as of a `TokenEvent`


class TokenEvent(msgspec.Struct, frozen=True, tag=True):
    """New tokens of an answer, and the text that they complete."""

    id: str
    tokens: list[int]
    text: str
    finish: Finish | None = None  # set in the last event of the request
    step: StepReport | None = None  # None while the prompt is read
    cached_tokens: int = 0  # prompt tokens found in the session's KV cache
    reuse: Reuse | None = None  # in the first event
    logprobs: TokenLogprobs | None = None  # if requested
    prompt_logprobs: TokenLogprobs | None = None  # log-probabilities of the prompt without its first token; in the first event
    stop_string: str | None = None  # the stop string that ended the answer; in the last event


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The request ended with an error; `message` may be shown to the client."""

    id: str
    message: str
    client_error: bool = False  # else a server error


class Status(msgspec.Struct, frozen=True, tag=True):
    """The worker's gauges."""

    sessions: int
    kv_cache_usage_ratio: float
    running_usage_ratio: float = 0.0  # without idle sessions
    max_active: int | None = None  # requests served concurrently from now on; None = as before
    alone: str = ""  # rows of the steps that one thread computes, because more have not gained


ToWorker = Start | Request | Cancel | Pause | Resume | Forget | Shutdown
FromWorker = Ready | Refused | Accepted | TokenEvent | Failed | Status
Event = Accepted | TokenEvent  # of a request

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode
