"""An HTTP client of a chat: lists models and streams answers.

Every failure is a ChatError with one sentence. Uses the standard library only, so that the chat starts at once.
"""

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit

# The timeout applies to connecting and to short answers.
TIMEOUT_SECONDS = 10.0
MAX_ERROR_BYTES = 1 << 16
# They would act on the terminal.
CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
NO_CHUNK = "The server sent something that is no part of a chat completion; is it an OpenAI-compatible server?"


class ChatError(Exception):
    """The chat cannot do what the user asked for; the message is one printable sentence."""

    def __init__(self, message: str, status: int | None = None) -> None:
        """`status` is that of a server's answer."""
        super().__init__(one_line(message))  # it may contain a server's words
        self.status = status


class NoServer(ChatError):
    """Nothing listens at the address."""


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """A client of one server. Each request has its own connection; closing a stream cancels its request."""

    def __init__(self, url: str, key: str | None = None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        """`url` is an HTTP address, which may end with /v1, or `unix:` and the path of a socket. Raises ChatError."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._key = key
        self._timeout_seconds = timeout_seconds
        try:
            parts = urlsplit(self.url)
            self._scheme, self._host, self._port = parts.scheme, parts.hostname, parts.port
        except ValueError:
            parts, self._scheme, self._host = urlsplit(""), "", None
        self._path = parts.path  # of the socket, or before the API's paths
        if not (self._host if self._scheme in ("http", "https") else self._scheme == "unix" and self._path):
            raise ChatError(
                f"{url!r} is not the address of a server; give one such as http://127.0.0.1:8000 or unix:/run/outrider.sock."
            )

    def model(self) -> str:
        """The name of the served model. Raises ChatError."""
        return str(self.cards()[0]["id"])

    def cards(self) -> list[dict[str, Any]]:
        """The entries of /v1/models, each with an `id`; at least one. Raises ChatError."""
        with self._answer("GET", "/v1/models") as response:
            try:
                cards = list(json.loads(response.read())["data"])
                _ = cards[0], [card["id"] for card in cards]
                return cards
            except (ValueError, LookupError, TypeError, RecursionError):
                raise ChatError(f"The server at {self.url} names no model; is it an OpenAI-compatible server?") from None

    def version(self) -> Any:
        """What the server says of itself. Raises ChatError. Needs no key."""
        with self._answer("GET", "/version") as response:
            try:
                return json.loads(response.read())
            except (ValueError, RecursionError):
                return {}

    def is_ready(self) -> bool:
        """Whether the server runs and has loaded its model."""
        try:
            with self._answer("GET", "/ready"):
                return True
        except ChatError:
            return False

    def state(self) -> str:
        """The server's own word for its state: ready, loading, restarting, draining or failed. Raises ChatError."""
        with self._answer("GET", "/ready", accepted=(200, 503)) as response:
            try:
                return one_line(str(json.loads(response.read())["status"]))
            except (ValueError, LookupError, TypeError, RecursionError):
                return "unknown"

    def metrics(self) -> str:
        """The metrics in Prometheus' text format. Raises ChatError."""
        with self._answer("GET", "/metrics") as response:
            return response.read().decode("utf-8", "replace")

    def stream(self, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The chunks of a chat completion. Raises ChatError. Close the generator to cancel the request."""
        ended = False
        with self._answer("POST", "/v1/chat/completions", {**body, "stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {") and line.endswith(b"\n"):  # without the line break, the stream was cut
                    yield read_chunk(line[6:])
                ended = ended or line.rstrip() == b"data: [DONE]"
            if not ended:
                raise http.client.IncompleteRead(b"")  # reading by lines does not report it

    @contextlib.contextmanager
    def _answer(
        self, method: str, path: str, body: Any = None, accepted: tuple[int, ...] = (200,)
    ) -> Iterator[http.client.HTTPResponse]:
        """A response with an accepted status. Raises ChatError, also if the connection breaks while the response is read."""
        connection = self._new_connection()
        try:
            self._connect(connection)
            if method == "POST":
                connection.sock.settimeout(None)  # a queued request may wait for long
            headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
            prefix = "" if self._scheme == "unix" else self._path
            connection.request(method, prefix + path, None if body is None else json.dumps(body).encode(), headers)
            response = connection.getresponse()
            if response.status not in accepted:
                raise ChatError(self._reason(response), response.status)
            yield response
        except TimeoutError:
            raise ChatError(
                f"The server at {self.url} does not answer; check whether it is an OpenAI-compatible one."
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError):
            raise ChatError(
                f"The server at {self.url} closed the connection before its answer was complete; "
                "ask again, or check whether it runs, and whether its address begins with https."
            ) from None
        finally:
            connection.close()

    def _new_connection(self) -> http.client.HTTPConnection:
        if self._scheme == "unix":
            return UnixConnection(self._path, self._timeout_seconds)
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        return kind(self._host or "", self._port, timeout=self._timeout_seconds)

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as error:
            raise ChatError(
                f"The certificate of {self.url} is not trusted: {error.verify_message}; if it is your own, name its file "
                "or its authority's in the environment variable SSL_CERT_FILE."
            ) from None
        except ssl.SSLError:
            raise ChatError(f"The server at {self.url} does not speak TLS; give an address with http://.") from None
        except (OSError, UnicodeError):
            raise NoServer(
                f"No server answers at {self.url}; start one with `outrider serve`, or chat with a model of its own: "
                "`outrider chat --model MODEL`."
            ) from None

    def _reason(self, response: http.client.HTTPResponse) -> str:
        if response.status == 401:
            needs = f"The server at {self.url} needs an API key that it knows"
            return f"{needs}; give it with --api-key, or with --url and OPENAI_API_KEY."
        try:
            message = stated_error(json.loads(response.read(MAX_ERROR_BYTES))["error"])
        except (ValueError, LookupError, TypeError, RecursionError):
            message = ""
        return message or f"The server at {self.url} answered with status {response.status}."


def read_chunk(data: bytes) -> dict[str, Any]:
    """A chunk of a stream. Raises ChatError if it is an error or no JSON."""
    try:
        chunk: dict[str, Any] = json.loads(data)
    except (ValueError, RecursionError):
        raise ChatError(NO_CHUNK) from None
    if chunk.get("error"):
        raise ChatError(stated_error(chunk["error"]) or "The server failed.")
    return chunk


def stated_error(error: Any) -> str:
    """The message of an error, which is a text or an object with one; empty if there is none."""
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def printable(text: str) -> str:
    """The text without control characters other than line breaks and tabs."""
    return text.translate(CONTROLS)


def one_line(text: str) -> str:
    """The printable text with its line breaks and runs of spaces as single spaces."""
    return " ".join(printable(text).split())
