"""TLS: a certificate and its key as PEM files, which are read again when they change.

Promises that handshakes after a renewal get the new certificate, that open connections stay, and that files which cannot be
used change nothing while the server runs.
"""

import logging
import ssl
from pathlib import Path

from outrider.server.settings import Server, SettingsError

# OpenSSL has the last reason for a key of another algorithm.
MISFITS = ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED")
log = logging.getLogger("outrider.tls")


def server_context(settings: Server) -> ssl.SSLContext | None:
    """The TLS of a server; None if it speaks plain HTTP. Raises SettingsError."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    return RenewedCertificate(settings.tls_certificate, settings.tls_key).context


class RenewedCertificate:
    """A certificate whose files are looked at in every handshake."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Raises SettingsError."""
        self._files = certificate, key
        self._states = self._look()
        self._newest = load(certificate, key)
        self.context = load(certificate, key)
        self.context.sni_callback = self._choose  # OpenSSL calls it in each handshake, whether a name is sent or not

    def _choose(self, connection: ssl.SSLSocket | ssl.SSLObject, *_: object) -> None:
        """Gives the handshake the certificate that the files hold now."""
        states = self._look()
        if states != self._states:
            self._states = states
            try:
                self._newest = load(*self._files)
                log.info("the TLS certificate was renewed")
            except SettingsError as error:  # one file may have been written, and the other not yet
                log.warning("the previous TLS certificate is still used: %s", error)
        connection.context = self._newest

    def _look(self) -> list[tuple[int, int, int] | None]:
        """What changes when a file is written or replaced; None if it is missing."""
        return [_state(path) for path in self._files]


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def load(certificate: Path, key: Path) -> ssl.SSLContext:
    """A context with this certificate. Raises SettingsError with one sentence if the files cannot be used."""
    _read(certificate, "server.tls_certificate", b"BEGIN CERTIFICATE")
    if b"ENCRYPTED" in _read(key, "server.tls_key", b"PRIVATE KEY"):
        raise SettingsError(f"The key {key} is encrypted; write it without a password: openssl pkey -in {key} -out NEW.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # a file may be replaced at this moment
        reason = getattr(error, "reason", None)
        if reason in MISFITS:
            raise SettingsError(f"The key {key} does not belong to the certificate {certificate}; name its own key.") from None
        reason = (reason or str(error)).lower().replace("_", " ")
        raise SettingsError(f"The certificate {certificate} and its key {key} cannot be used: {reason}.") from None
    return context


def _read(path: Path, setting: str, mark: bytes) -> bytes:
    """A PEM file that has `mark`. Raises SettingsError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting} names {path}, which cannot be read: {error.strerror}.") from None
    if mark not in content:
        raise SettingsError(f"{setting} names {path}, which has no line with {mark.decode()}; name a PEM file.")
    return content
