"""Base of the stand-ins for HTTP services: requests, responses, multipart bodies, servers."""

from __future__ import annotations

import contextlib
import email.parser
import json
import re
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit

SMALL_BODY = 1 << 16


@dataclass(frozen=True)
class Request:
    """One request, of a connection or of a part of a batch."""

    method: str
    target: str
    headers: Message = field(default_factory=Message)
    body: bytes = b""

    @cached_property
    def path(self) -> str:
        """The path, still percent-encoded."""
        return urlsplit(self.target).path

    @cached_property
    def query(self) -> dict[str, str]:
        """The parameters."""
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))

    def header(self, name: str) -> str:
        """A header's value, empty where it is absent."""
        return str(self.headers.get(name, ""))

    def json(self) -> dict[str, Any]:
        """The body, which may be empty."""
        return dict(json.loads(self.body)) if self.body.strip() else {}


@dataclass(frozen=True)
class Response:
    """One response."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of_json(
        cls, value: object, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> Response:
        """A response whose body is JSON."""
        content_type = {"Content-Type": "application/json; charset=UTF-8"}
        return cls(status, json.dumps(value).encode(), {**content_type, **(headers or {})})

    def head(self) -> bytes:
        """The status line and the headers."""
        lines = [f"HTTP/1.1 {self.status} {_phrase(self.status)}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        if self.status != HTTPStatus.NO_CONTENT:
            lines.append(f"Content-Length: {len(self.body)}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def split_head(text: bytes) -> tuple[bytes, bytes]:
    """What is before and what is after the first blank line."""
    blank = re.search(rb"\r?\n\r?\n", text)
    return (text[: blank.start()], text[blank.end() :]) if blank else (text, b"")


def parse_headers(head: bytes) -> Message:
    """Header lines as a message."""
    return email.parser.BytesHeaderParser().parsebytes(head)


def split_multipart(content_type: str, body: bytes) -> list[tuple[Message, bytes]]:
    """Headers and contents of each part, without the line break before a boundary."""
    holder = Message()
    holder["Content-Type"] = content_type
    boundary = b"--" + str(holder.get_param("boundary")).encode()
    line_break = b"\r\n" if boundary + b"\r\n" in body else b"\n"
    parts = (line_break + body).split(line_break + boundary)[1:-1]
    split = [split_head(part.removeprefix(line_break)) for part in parts]
    return [(parse_headers(head), content) for head, content in split]


class _Handler(BaseHTTPRequestHandler):
    """Reads requests and writes what the server's `answer` makes of them."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: HttpServer

    def answer(self) -> None:
        """Any method."""
        request = Request(self.command, self.path, self.headers, self._body())
        response = self.server.answer(request)
        head = response.head()
        body = b"" if self.command == "HEAD" else response.body
        if len(body) <= SMALL_BODY:
            self.wfile.write(head + body)
        else:
            self.wfile.write(head)
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests count requests instead."""


class HttpServer(ThreadingHTTPServer):
    """A thread per connection; `stop` also ends the connections that clients keep open."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, port: int, answer: Callable[[Request], Response]) -> None:
        self.answer = answer
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(("localhost", port), _Handler)

    def server_bind(self) -> None:
        """Binds without asking the name service for the machine's full name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = "localhost"
        self.server_port = self.server_address[1]

    def start(self) -> None:
        """Serves in a thread."""
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()

    def stop(self) -> None:
        """Ends the server and its connections."""
        self.shutdown()
        self.server_close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Remembers the connection."""
        with self._lock:
            self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forgets the connection."""
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class HttpStandIn:
    """Serves at `url`, while it is entered; entered again, at the same place.

    Attributes:
        faults: Requests that it cannot answer; leaving it raises them.
    """

    def __init__(self, port: int = 0) -> None:
        self.faults: list[str] = []
        self._port = port

    def __enter__(self) -> Self:
        self._server = HttpServer(self._port, self._receive)
        self._port = self._server.server_port
        self._server.start()
        return self

    @property
    def url(self) -> str:
        """URL of the service once it is entered.

        It must contain "localhost", so that Beam speaks REST without credentials.
        """
        return f"http://localhost:{self._port}"

    def __exit__(self, kind: object, *rest: object) -> None:
        self._server.stop()
        if self.faults and kind is None:
            raise AssertionError(
                f"{type(self).__name__} was asked for what it cannot do:\n" + "\n".join(self.faults)
            )

    def _receive(self, request: Request) -> Response:
        """Answers a request of a connection."""
        raise NotImplementedError
