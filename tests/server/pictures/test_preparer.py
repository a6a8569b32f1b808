"""The program that decodes pictures and prepares them, and its process."""

import io
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from outrider.server.engine.helper import BlockingHelper, HelperEnded
from outrider.server.pictures.messages import Load, Loaded, Prepare, Prepared, decode_answer, encode
from outrider.server.pictures.preparer import MAX_PIXELS, Preparer, UnreadablePicture, open_picture
from tests.server.pictures.models import picture, write_qwen


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def request(data: bytes, max_pixels: int = MAX_PIXELS, max_bytes: int = 1 << 30) -> Prepare:
    return Prepare(data, max_pixels, max_bytes)


def test_pictures_are_rgb_whatever_their_file_is() -> None:
    colours = Image.new("RGB", (30, 20), (200, 100, 50))
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        found = open_picture(file_of(colours, kind))
        assert (found.mode, found.size) == ("RGB", (30, 20))
        assert np.abs(np.asarray(found)[10, 10].astype(int) - [200, 100, 50]).max() < 12, kind
    for mode in ("1", "L", "P", "RGBA", "I;16"):
        assert open_picture(file_of(Image.new(mode, (4, 4)), "PNG")).mode == "RGB"


def test_a_picture_that_a_camera_has_turned_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert open_picture(file_of(Image.new("RGB", (30, 20)), "JPEG", exif=exif)).size == (20, 30)


@pytest.mark.parametrize("data", [b"", b"hello", picture(1)[:100], b"%PDF-1.7", b"<svg xmlns='http://www.w3.org/2000/svg'/>"])
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(UnreadablePicture, match="cannot be read; send a PNG, JPEG, WebP, GIF or BMP file"):
        open_picture(data)


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    side = int(MAX_PIXELS**0.5) + 1
    bomb = file_of(Image.new("1", (side, side)), "PNG")
    assert len(bomb) < 20_000
    with pytest.raises(UnreadablePicture, match="has 64 million pixels"):
        open_picture(bomb)


def test_equal_pictures_have_equal_digests(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    preparer = Preparer(Load(str(tmp_path), "main", False))
    first, again, other = (preparer.prepare(request(file)) for file in (picture(1), picture(1), picture(2)))
    assert first == again and first.digest != other.digest
    assert preparer.placeholder == "<|image_pad|>" and first.text == "<|image_pad|>" * len(first.tokens)
    assert first.arrays["pixel_values"].shape == (4 * len(first.tokens), 3 * 2 * 14 * 14)


def test_what_is_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    write_qwen(tmp_path)
    preparer = Preparer(Load(str(tmp_path), "main", False))
    found = preparer.prepare(request(picture(1)))
    size = sum(len(array.data) for array in found.arrays.values())
    assert preparer.prepare(request(picture(1), found.pixels, size)) == found
    with pytest.raises(UnreadablePicture, match="is too large with the others"):
        preparer.prepare(request(picture(1), found.pixels, size - 1))
    with pytest.raises(UnreadablePicture, match="has more pixels than the others of the request leave"):
        preparer.prepare(request(picture(1), found.pixels - 1, size))


posix = pytest.mark.skipif(not hasattr(signal, "SIGPROF"), reason="needs POSIX")


@pytest.fixture
def process() -> Iterator[BlockingHelper]:
    found = BlockingHelper("outrider.server.pictures.preparer")
    yield found
    found.close()


@posix
def test_a_picture_is_prepared(process: BlockingHelper, tmp_path: Path) -> None:
    write_qwen(tmp_path)
    assert isinstance(decode_answer(process.ask(encode(Load(str(tmp_path), "main", False)), 60)), Loaded)
    answer = decode_answer(process.ask(encode(Prepare(picture(1), 1_000_000, 1 << 20)), 60))
    assert isinstance(answer, Prepared) and answer.tokens
    os.kill(process.pid, signal.SIGPROF)  # as its limit of processor time does
    with pytest.raises(HelperEnded) as raised:
        process.ask(encode(Prepare(picture(1), 1_000_000, 1 << 20)), 60)
    assert raised.value.code == -signal.SIGPROF


@posix
def test_a_process_that_is_silent_is_killed(process: BlockingHelper) -> None:
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(HelperEnded) as raised:
        process.ask(encode(Load("none", "main", False)), 0.01)
    assert raised.value.code == -signal.SIGKILL
