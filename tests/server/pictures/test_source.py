"""Where pictures come from, and the program that decodes and prepares them."""

import asyncio
import base64
import io
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from outrider.server.engine.helper import BlockingHelper, HelperEnded
from outrider.server.http.errors import APIError
from outrider.server.pictures import source
from outrider.server.pictures.messages import Load, Loaded, Prepare, Prepared, decode_answer, encode
from outrider.server.pictures.preparer import MAX_PIXELS, Preparer, UnreadablePicture, open_picture
from outrider.server.pictures.source import is_public, public_address, read_data_url, read_picture
from tests.server.pictures.models import picture, write_qwen
from tests.stand_in import answering

FILE = b"a picture"
# Of IPv4 and IPv6: reserved, private, multicast, and those that lead to an IPv4 address.
NOT_PUBLIC = """
0.0.0.0 10.0.0.1 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 168.63.129.16 169.254.169.254 172.16.0.1
172.31.255.255 192.0.0.1 192.0.0.8 192.0.0.170 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1
198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.250 240.0.0.1 255.255.255.255 :: ::1 ::127.0.0.1
::169.254.169.254 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:a9fe:a9fe ::ffff:224.0.0.1 ::ffff:0:127.0.0.1
::ffff:0:8.8.8.8 64:ff9b::a9fe:a9fe 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::7f00:1 100::1 100:0:0:1::1
2001::1 2001:0:7f00:1:: 2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe:: 2002:808:808::1
3fff::1 5f00::1 4000::1 2600::5efe:7f00:1 2600::200:5efe:a9fe:a9fe fc00::1 fd00:ec2::254 fe80::1 fe80::1%eth0
fec0::1 feff::1 ff02::1 ff05::1 ff0e::1
"""


PAGES = {
    "/picture": (200, FILE.decode()),
    "/moved": (302, "", ("Location", "/picture")),
    "/private": (302, "", ("Location", "http://10.0.0.1/picture")),
    "/circle": (302, "", ("Location", "/circle")),
    "/large": (200, "x" * 2000),
}


def fetch(url: str, fetches: bool = True) -> bytes:
    return asyncio.run(read_picture(url, fetches))


def refusal(url: str, fetches: bool = True) -> str:
    with pytest.raises(APIError) as raised:
        fetch(url, fetches)
    assert raised.value.status_code == 400
    return raised.value.message


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the addresses of this machine for public ones, but no others."""

    async def address(host: str, port: int) -> str:
        return host if host == "127.0.0.1" else await public_address(host, port)

    monkeypatch.setattr(source, "public_address", address)


def test_data_urls() -> None:
    encoded = base64.b64encode(FILE).decode()
    assert fetch(f"data:image/png;base64,{encoded}", fetches=False) == FILE
    for url in ("data:", "data:image/png,abc", f"data:image/png;base64,{encoded}!", "data:image/png;base64,é"):
        with pytest.raises(APIError, match="must be data:image"):
            read_data_url(url)


def test_pictures_are_fetched_only_if_the_settings_allow_it() -> None:
    assert "fetches no pictures" in refusal("http://127.0.0.1/picture", fetches=False)
    assert "must begin with" in refusal("file:///etc/passwd")
    assert "must begin with" in refusal("picture.png")


@pytest.mark.usefixtures("local")
def test_fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(PAGES) as address:
        assert fetch(f"{address}/picture") == fetch(f"{address}/moved") == FILE
        for path in ("/none", "/circle"):
            assert "could not be fetched" in refusal(address + path)
        assert "is not public" in refusal(f"{address}/private")
        monkeypatch.setattr(source, "MAX_BYTES", 1000)
        assert "more than 0 MiB" in refusal(f"{address}/large")
    assert "could not be fetched" in refusal(f"{address}/picture")  # the server has ended
    assert "could not be fetched" in refusal("http://")


@pytest.mark.usefixtures("local")
def test_a_server_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FETCH_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "could not be fetched within" in refusal(f"http://127.0.0.1:{silent.getsockname()[1]}/")


def test_a_name_with_one_private_address_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(addresses: list[str]) -> str:
        loop = asyncio.get_running_loop()

        async def found(*_: Any, **__: Any) -> list[Any]:
            return [(0, 0, 0, "", (address, 80)) for address in addresses]

        monkeypatch.setattr(loop, "getaddrinfo", found)
        return await public_address("name", 80)

    assert asyncio.run(resolve(["93.184.215.14", "1.1.1.1"])) == "93.184.215.14"
    with pytest.raises(APIError, match="is not public"):
        asyncio.run(resolve(["93.184.215.14", "10.0.0.1"]))


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_addresses_that_are_not_public_or_lead_to_others(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["1.1.1.1", "93.184.215.14", "::ffff:8.8.8.8", "2606:4700::1111", "2a00:1450:4001::200e"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


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
@pytest.mark.slow
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
