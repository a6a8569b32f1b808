"""Reads pictures from the request itself, or fetches them from an address if the settings allow it.

Fetching is limited in bytes and time. Only public addresses are asked: a request must not reach the server's own network.
"""

import asyncio
import base64
import binascii
import ipaddress
import socket
from collections.abc import AsyncIterable
from typing import Any
from urllib.parse import urljoin

from outrider.server.http.errors import APIError

MAX_BYTES = 32 << 20
FETCH_SECONDS = 10.0
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
# `is_global` of Python does not know these, or takes them for global ones. Of IPv6, only GLOBAL_UNICAST is asked, which leaves
# out multicast and site-local addresses, and those that NAT64, translators and old tunnels map to an IPv4 address.
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
NOT_PUBLIC = tuple(
    map(
        ipaddress.ip_network,
        (
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # relays of 6to4
            "224.0.0.0/3",  # multicast, reserved, broadcast
            "168.63.129.16/32",  # the host of a virtual machine in Azure
            "2001::/23",  # protocol assignments: Teredo, ORCHID
            "2001:db8::/32",  # documentation
            "2002::/16",  # 6to4
            "3fff::/20",  # documentation
        ),
    )
)
# The interface identifiers of ISATAP, before an IPv4 address.
ISATAP = (0x00005EFE, 0x02005EFE)


def invalid(message: str) -> APIError:
    """The error of a request whose picture is wrong."""
    return APIError(400, message, "messages", "invalid_image")


async def read_picture(url: str, fetches: bool) -> bytes:
    """The file at a URL. Raises APIError."""
    if url.startswith("data:"):
        return read_data_url(url)
    if not url.startswith(("http://", "https://")):
        raise invalid("The URL of a picture must begin with data:, http:// or https://.")
    if not fetches:
        raise invalid("This server fetches no pictures; send the picture itself, as a data URL (data:image/png;base64,...).")
    try:
        return await asyncio.wait_for(fetch(url), FETCH_SECONDS)
    except TimeoutError:
        raise invalid(f"The picture could not be fetched within {FETCH_SECONDS:.0f} seconds; send it as a data URL.") from None


def read_data_url(url: str) -> bytes:
    """The file in a data URL. Raises APIError."""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        raise invalid("The data URL of a picture must be data:image/...;base64, followed by the file in base64.") from None


async def fetch(url: str) -> bytes:
    """The file at a public address. Raises APIError."""
    import httpcore  # only servers that fetch pictures load it

    class PublicBackend(httpcore.AnyIOBackend):
        """A network that connects to public addresses only."""

        async def connect_tcp(self, host: str, port: int, *args: Any, **options: Any) -> httpcore.AsyncNetworkStream:
            # The address that was checked is the one that is connected to, whatever the name resolves to next.
            return await super().connect_tcp(await public_address(host, port), port, *args, **options)

    try:
        async with httpcore.AsyncConnectionPool(network_backend=PublicBackend()) as pool:
            for _ in range(1 + MAX_REDIRECTS):
                async with pool.stream("GET", url) as response:
                    location = {name.lower(): value for name, value in response.headers}.get(b"location")
                    if response.status == 200:
                        return await read_body(response.aiter_stream())
                if location is None or response.status not in REDIRECTS:
                    break
                url = urljoin(url, location.decode("latin-1"))
    except (
        httpcore.NetworkError,
        httpcore.ProtocolError,
        httpcore.TimeoutException,
        httpcore.UnsupportedProtocol,
        OSError,
        ValueError,
    ):
        pass
    raise invalid("The picture could not be fetched from its URL; send it as a data URL.")


async def read_body(parts: AsyncIterable[bytes]) -> bytes:
    """A body of at most MAX_BYTES. Raises APIError."""
    data = bytearray()
    async for part in parts:
        data += part
        if len(data) > MAX_BYTES:
            raise invalid(f"The picture has more than {MAX_BYTES >> 20} MiB; send a smaller one.")
    return bytes(data)


async def public_address(host: str, port: int) -> str:
    """An address of a host. Raises APIError if one of them is not public, and OSError if there is none."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    if not all(map(is_public, addresses)):
        raise invalid("The picture's address is not public, so it is not fetched; send the picture as a data URL.")
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet, and leads to no other address."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address not in GLOBAL_UNICAST or int(address) >> 32 & 0xFFFFFFFF in ISATAP:
            return False
    return address.is_global and not any(address in network for network in NOT_PUBLIC)
