"""The program that decodes pictures and prepares them with the model's own processor, in a process of its own.

A picture that makes a decoder crash ends this process only. Nothing needs torchvision, which few installations for a CPU have:
processors of transformers work without their part for videos, and most of them prepare images by Pillow and numpy.
"""

import contextlib
import hashlib
import io
from pathlib import Path
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
from outrider.server.pictures.messages import Failed, Load, Loaded, Prepare, Prepared, decode_request, encode
from outrider.server.system import limit_memory, limit_processor_time
from outrider.verify.errors import first_sentence
from outrider.verify.tokenizer import load_by_transformers

NICENESS = 10
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# A file of some kilobytes can hold a picture of gigabytes. A photo of today's phones has 50 million pixels.
MAX_PIXELS = 64_000_000
# A picture may take this long, and its arrays this much beside what the process has when the processor is loaded: the largest
# picture has 192 MB, and processors compute with several copies in float32.
CPU_SECONDS = 30.0
MEMORY_BYTES = 6 << 30
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
                limit_growth()
                return encode(Loaded(preparers[0].placeholder))
            limit_processor_time(CPU_SECONDS)
            return encode(preparers[0].prepare(request))
        except UnreadablePicture as error:
            return encode(Failed(str(error)))
        except MemoryError:
            return encode(Failed("takes too much memory; scale it down"))
        except Exception as error:  # whatever a model's processor raises
            return encode(Failed(f"cannot be prepared by the model's processor: {first_sentence(error)}"))
        finally:
            limit_processor_time(0)

    answer_all(argument, answer, NICENESS)


def limit_growth() -> None:
    """Bounds the memory that a picture may take, where the system tells how much there is already."""
    with contextlib.suppress(OSError, ValueError):
        status = Path("/proc/self/status").read_text()
        (size,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmSize:"))
        limit_memory((int(size) << 10) + MEMORY_BYTES)


class Preparer:
    def __init__(self, request: Load) -> None:
        """Raises whatever transformers raises."""
        source: dict[str, Any] = {"revision": request.revision, "trust_remote_code": request.trust_remote_code}
        config = AutoConfig.from_pretrained(request.path, **source)
        tokenizer = load_by_transformers(request.path, request.trust_remote_code, request.revision)
        self._processor = load_processor(request.path, config.model_type, tokenizer, source)
        self._pixels = int(getattr(config, "image_token_id", None) or config.image_token_index)
        self.placeholder = str(self._processor.image_token)

    def prepare(self, request: Prepare) -> Prepared:
        """The picture in a file. Raises UnreadablePicture, and whatever the processor raises."""
        picture = open_picture(request.data, request.max_pixels)
        found = self._processor(text=[self.placeholder], images=[picture], add_special_tokens=False, return_tensors="np")
        ids = np.asarray(found["input_ids"])[0].tolist()
        text = self._processor.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if self._processor.tokenizer(text, add_special_tokens=False)["input_ids"] != ids:
            raise UnreadablePicture("cannot be served: the model's tokenizer does not find its tokens again")
        pixels = [number for number, token in enumerate(ids) if token == self._pixels]
        values = {name: np.ascontiguousarray(value) for name, value in found.items() if name not in NO_ARGUMENTS}
        if sum(each.nbytes for each in values.values()) > request.max_bytes:
            raise UnreadablePicture("is too large with the others of the request, as the model reads it; scale it down")
        arrays = {name: Array(each.dtype.name, each.shape, each.tobytes()) for name, each in values.items()}
        digest = hashlib.blake2b(encode(arrays), digest_size=32).digest()
        return Prepared(text, ids[pixels[0] : pixels[-1] + 1], arrays, digest, picture.width * picture.height)


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


def open_picture(data: bytes, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture in a file, upright and in RGB. Raises UnreadablePicture."""
    Image.MAX_IMAGE_PIXELS = None  # the limit here is exact
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = picture.size
        if width * height > max_pixels and max_pixels < MAX_PIXELS:
            raise UnreadablePicture("has more pixels than the others of the request leave; send fewer or scale them down")
        if width * height > MAX_PIXELS:
            size, limit = round(width * height / 1e6), MAX_PIXELS // 1_000_000
            raise UnreadablePicture(f"has {size} million pixels, and {limit} are allowed; scale it down")
        return ImageOps.exif_transpose(picture).convert("RGB")
    except UnreadablePicture:
        raise
    except Exception:  # decoders raise many types
        raise UnreadablePicture("cannot be read; send a PNG, JPEG, WebP, GIF or BMP file") from None
