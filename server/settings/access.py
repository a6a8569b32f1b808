"""Settings of who may reach the server: addresses, TLS, connections, API keys with their quotas, and the metrics page."""

import ipaddress
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from outrider.server.settings.section import Section

# A host with this in front of a path is a UNIX socket.
UNIX = "unix:"
# Requests for these would lose their beginning.
OWN_PATHS = re.compile(r"/(v1(/.*)?|api|health|ready|version|metrics|infill|tokenize|detokenize)")


def _check_prefix(prefix: str | None) -> str | None:
    if prefix is not None and not re.fullmatch(r"(/(?!\.{1,2}(/|$))[\w.~-]+)+", prefix, re.ASCII):
        raise ValueError("write it with a slash before it and none behind it, such as /llm")
    if prefix is not None and OWN_PATHS.fullmatch(prefix):
        raise ValueError("the API has a path of this name; choose another prefix, such as /llm")
    return prefix


def _check_host(host: str) -> str:
    if host.startswith(UNIX) and not re.fullmatch(r"unix:[^,]+(,mode=0?[0-7]{3})?", host):
        raise ValueError("write unix:PATH or unix:PATH,mode=660, with three octal digits")
    return host


class Server(Section):
    """The HTTP front end."""

    host: Annotated[str, AfterValidator(_check_host)] = Field(
        "127.0.0.1",
        description="Address to listen on; or unix:PATH, a UNIX socket that only the server's user may connect to, or "
        "unix:PATH,mode=660.",
    )
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free port.")
    tls_certificate: Annotated[Path, AfterValidator(Path.expanduser)] | None = Field(
        None, description="PEM file of the certificate and its chain; changed files are used at once. null speaks plain HTTP."
    )
    tls_key: Annotated[Path, AfterValidator(Path.expanduser)] | None = Field(
        None, description="PEM file of the certificate's key, without a password."
    )
    path_prefix: Annotated[str | None, AfterValidator(_check_prefix)] = Field(
        None, description="Path such as /llm below which a proxy shows the server, whether it strips the path or not."
    )
    coalesce_ms: int = Field(
        0,
        ge=0,
        le=10_000,
        description="Send streams in parts at this interval of milliseconds, to hide which drafts were accepted; 0 sends each "
        "token at once.",
    )
    page: bool = Field(True, description="Serve the playground, a chat in the browser, at /.")
    drain_seconds: float = Field(30.0, ge=0, description="Time that running requests have to finish at shutdown.")
    cors_origins: tuple[str, ...] = Field((), description="Allowed CORS origins; an empty list disables CORS.")
    allowed_hosts: tuple[str, ...] | None = Field(
        None,
        description="Host names of requests beside localhost, server.host and IP addresses; * allows every name. null allows "
        "every name if there are API keys, and otherwise no others.",
    )
    trusted_proxies: tuple[str, ...] = Field(
        (),
        description="Addresses or networks of reverse proxies whose X-Forwarded-For header names the client; an empty list "
        "ignores the header.",
    )

    @property
    def is_local(self) -> bool:
        """Whether the server is reachable from this machine only."""
        return self.host.startswith(UNIX) or is_loopback(self.host)

    @property
    def socket_file(self) -> tuple[Path, int] | None:
        """The UNIX socket's path and mode; None without one."""
        if not self.host.startswith(UNIX):
            return None
        path, _, mode = self.host.removeprefix(UNIX).partition(",mode=")
        return Path(path).expanduser(), int(mode or "600", 8)


class ApiKey(Section):
    """One client's API key, its datastores and its quotas."""

    key: SecretStr = Field(min_length=8, description="The secret that the client sends as a bearer token.")
    datastores: tuple[str, ...] = Field((), description="Suffix datastores that only this key's requests search.")
    max_concurrent: int | None = Field(None, ge=1, description="Overrides auth.max_concurrent for this key.")
    requests_per_minute: int | None = Field(None, ge=1, description="Overrides auth.requests_per_minute for this key.")


def _expand_bare_key(value: Any) -> Any:
    return {"key": value} if isinstance(value, str) else value


class Auth(Section):
    """API keys and quotas. Without keys, every request is accepted."""

    file: Path | None = Field(None, description="YAML file with further keys, in the format of auth.keys.")
    keys: dict[str, Annotated[ApiKey, BeforeValidator(_expand_bare_key)]] = Field(
        {}, description="API keys by client name; each value is a key, or a section with key, datastores and quotas."
    )
    open: bool = Field(False, description="Allow a public address without API keys.")
    max_concurrent: int | None = Field(
        64, ge=1, description="Maximum concurrent requests per key; null sets no limit, like the default without keys."
    )
    requests_per_minute: int | None = Field(
        None,
        ge=1,
        description="Maximum requests per minute and key, where each choice of each prompt counts; null sets no limit.",
    )

    @property
    def concurrent_limit(self) -> int | None:
        """`max_concurrent`. Its default is one for keys: without keys, all clients together are one principal."""
        return self.max_concurrent if self.keys or "max_concurrent" in self.model_fields_set else None


class MetricsAccess(Section):
    """Access to /metrics. A server with API keys refuses it until a port or a key is set."""

    host: str = Field("127.0.0.1", description="Address on which metrics.port listens.")
    port: int | None = Field(
        None, ge=0, le=65535, description="Separate port for /metrics; 0 picks a free port, and null serves it on server.port."
    )
    key: SecretStr | None = Field(None, min_length=8, description="Bearer token that /metrics requires; null requires none.")


def is_loopback(host: str) -> bool:
    """Whether the address is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
