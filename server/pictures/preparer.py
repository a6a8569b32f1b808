"""The program that decodes pictures and prepares them with the model's own processor, in a process of its own.

A picture that makes a decoder crash ends this process only. Nothing needs torchvision, which few installations for a CPU have:
processors of transformers work without their part for videos, and most of them prepare images by Pillow and numpy.
"""

from __future__ import annotations

import hashlib
import io
from typing import Any

import numpy as np
import transformers
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from outrider.server.engine.helper import answer_all
from outrider.server.engine.messages import Array
from outrider.server.pictures.messages import Failed, Load, Loaded, Prepared, decode_request, encode
from outrider.verify.errors import first_sentence
from outrider.verify.tokenizer import load_tokenizer

NICENESS = 10
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A file of some kilobytes can hold a picture of gigabytes. A photo of today's phones has 50 million pixels.
MAX_PIXELS = 64_000_000
# What processors return beside arguments of the forward.
NO_ARGUMENTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}


class UnreadablePicture(ValueError):
    """The message continues "The picture"."""


def main(argument: str) -> None:
    """Answers requests from the socket until the front end closes it."""
    preparers: list[Preparer] = []

    def answer(message: bytes) -> bytes:
        request = decode_request(message)
        try:
            if isinstance(request, Load):
                preparers[:] = [Preparer(request)]
                return encode(Loaded(preparers[0].placeholder))
            return encode(preparers[0].prepare(request.data))
        except UnreadablePicture as error:
            return encode(Failed(str(error)))
        except Exception as error:  # whatever a model's processor raises
            return encode(Failed(f"cannot be prepared by the model's processor: {first_sentence(error)}"))

    answer_all(argument, answer, NICENESS)


class Preparer:
    """The processor of one model."""

    def __init__(self, request: Load) -> None:
        """Raises whatever transformers raises."""
        source: dict[str, Any] = {"revision": request.revision, "trust_remote_code": request.trust_remote_code}
        config = AutoConfig.from_pretrained(request.path, **source)
        tokenizer = load_tokenizer(request.path, request.trust_remote_code, request.revision)
        self._processor = load_processor(request.path, config.model_type, tokenizer, source)
        self._pixels = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self.placeholder = str(self._processor.image_token)

    def prepare(self, data: bytes) -> Prepared:
        """The picture in a file. Raises UnreadablePicture, and whatever the processor raises."""
        found = self._processor(
            text=[self.placeholder], images=[open_picture(data)], add_special_tokens=False, return_tensors="np"
        )
        ids = np.asarray(found["input_ids"])[0].tolist()
        text = self._processor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._processor.tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise UnreadablePicture("cannot be served: the model's tokenizer does not find its tokens again")
        pixels = [number for number, token in enumerate(ids) if token == self._pixels]
        values = {name: np.ascontiguousarray(value) for name, value in found.items() if name not in NO_ARGUMENTS}
        arrays = {name: Array(each.dtype.name, each.shape, each.tobytes()) for name, each in values.items()}
        digest = hashlib.blake2b(encode(arrays), digest_size=32).digest()
        return Prepared(text, ids[pixels[0] : pixels[-1] + 1], arrays, digest)


def load_processor(path: str, model_type: str, tokenizer: Any, source: dict[str, Any]) -> Any:
    """The processor of a model, without its part for videos where torchvision is missing."""
    base: Any = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    if is_torchvision_available():
        return base.from_pretrained(path, **source)
    images = AutoImageProcessor.from_pretrained(path, backend="pil", **source)
    parts = {"image_processor": images, "tokenizer": tokenizer}

    class WithoutVideos(base):  # type: ignore[misc]
        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, _: str, argument: Any) -> type:
            return type(argument)

    processor: ProcessorMixin = WithoutVideos.from_pretrained(path, **source)
    return processor


def open_picture(data: bytes) -> Image.Image:
    """The picture in a file, upright and in RGB. Raises UnreadablePicture."""
    Image.MAX_IMAGE_PIXELS = None  # the limit here is exact
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > MAX_PIXELS:
            size, limit = round(width * height / 1e6), MAX_PIXELS // 1_000_000
            raise UnreadablePicture(f"has {size} million pixels, and {limit} are allowed; scale it down")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except UnreadablePicture:
        raise
    except Exception:  # decoders raise many types
        raise UnreadablePicture("cannot be read; send a PNG, JPEG, WebP, GIF or BMP file") from None
