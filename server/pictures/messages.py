"""Messages between the front end and the process that prepares pictures."""

import msgspec

from outrider.server.engine.messages import Array


class Load(msgspec.Struct, frozen=True, tag=True):
    """The first message. Its answer is `Loaded`."""

    path: str
    revision: str
    trust_remote_code: bool


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """A picture to prepare. The answer is `Prepared`."""

    data: bytes  # of a file
    max_pixels: int  # of the picture in it
    max_bytes: int  # of the arrays


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model's processor is in memory."""

    placeholder: str  # what the chat template writes for a picture


class Prepared(msgspec.Struct, frozen=True, tag=True):
    """A picture as the model takes it."""

    text: str  # what stands for it in the rendered prompt, special tokens included
    tokens: list[int]  # from its first token of pixels to its last one, maybe with separators in between
    arrays: dict[str, Array]
    digest: bytes  # of the arrays
    pixels: int  # of the picture in the file


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The picture or the model's processor could not be read."""

    message: str  # continues a sentence about pictures, such as "cannot be read"


encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Load | Prepare).decode
decode_answer = msgspec.msgpack.Decoder(Loaded | Prepared | Failed).decode
