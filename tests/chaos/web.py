"""A web server that answers well, or for a while badly: errors, resets, torn and slow bodies."""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_RESET = struct.pack("ii", 1, 0)
"""Socket option: closing then sends a reset."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: MoodyServer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # a client that was killed, or a connection that was reset
            self.close_connection = True

    def _answer(self, *, with_body: bool) -> None:
        mishap = self.server.draw_mishap()
        if mishap is not None and mishap(self):
            return
        path = self.server.folder / self.path.lstrip("/")
        body = path.read_bytes() if path.is_file() else b""
        self.send_response(200 if path.is_file() else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)


def _refuse(handler: _Handler) -> bool:
    handler.send_response(503)
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def _reset(handler: _Handler) -> bool:
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    handler.connection.close()
    handler.close_connection = True
    return True


def _tear(handler: _Handler) -> bool:
    path = handler.server.folder / handler.path.lstrip("/")
    if not path.is_file():
        return False
    body = path.read_bytes()
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body[: len(body) // 2])
    handler.close_connection = True
    return True


def _be_slow(_: _Handler) -> bool:
    time.sleep(random.uniform(0.1, 1.0))
    return False


_MISHAPS: dict[str, Callable[[_Handler], bool]] = {
    "503": _refuse,
    "reset": _reset,
    "torn body": _tear,
    "slow": _be_slow,
}


class MoodyServer(ThreadingHTTPServer):
    """Serves a folder while it is entered.

    Args:
        folder: the folder.
        seed: of the draw of mishaps.

    Attributes:
        folder: the folder.
        bad_share: share of the requests that are answered badly.
        mishaps: how many were, by what was done.
    """

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.bad_share = 0.0
        self.mishaps: Counter[str] = Counter()
        self._chance = random.Random(seed)
        super().__init__(("localhost", 0), _Handler)

    @property
    def url(self) -> str:
        """URL of the folder."""
        return f"http://localhost:{self.server_port}"

    def __enter__(self) -> MoodyServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def draw_mishap(self) -> Callable[[_Handler], bool] | None:
        """Draw what is done to the present request; None to answer it properly."""
        if self._chance.random() >= self.bad_share:
            return None
        name = self._chance.choice(sorted(_MISHAPS))
        self.mishaps[name] += 1
        return _MISHAPS[name]
