"""Messages between the front end and the process of an encoder."""

import msgspec

from outrider.server.encoders.kind import Kind


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message. Its answer is `Loaded`."""

    kind: Kind
    path: str
    revision: str
    device: str | None  # None = a GPU if there is one
    dtype: str  # of the weights; "auto" = the checkpoint's
    threads: int | None  # None = one per core
    trust_remote_code: bool


class Embed(msgspec.Struct, frozen=True, tag=True):
    """Texts to embed. The answer is `Vectors`."""

    texts: list[str]
    input_type: str | None  # query or document, for models that have prompts for them
    dimensions: int | None  # the first ones of a vector, which is scaled to length 1; None = all, as the model makes them


class Score(msgspec.Struct, frozen=True, tag=True):
    """Documents to score for the query of each. The answer is `Scores`."""

    pairs: list[tuple[str, str]]


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is in memory."""

    dimensions: int | None  # of a vector
    max_tokens: int | None  # that are read of a text, or of a query and a document; None = all


class Vectors(msgspec.Struct, frozen=True, tag=True):
    values: bytes  # float32 [N, D]
    tokens: list[int]  # [N]; before the texts are cut to max_tokens


class Scores(msgspec.Struct, frozen=True, tag=True):
    values: list[float]
    tokens: list[int]  # see `Vectors`; of each query and document together


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model could not do it."""

    message: str  # one sentence


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Load | Embed | Score).decode
decode_answer = msgspec.msgpack.Decoder(Loaded | Vectors | Scores | Failed).decode
