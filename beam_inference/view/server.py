"""Neuroglancer's client, its state and the folders of local volumes, over HTTP from one port.

Everything lies under a random token, so that neither other users of the machine nor other pages in
the browser can guess it. Of a folder only what a viewer reads can be had: regular files that really
lie in it, and no job's state.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import tornado.web
from tornado.httpserver import HTTPServer

from beam_inference.config.fields import Json
from beam_inference.errors import ConfigError
from beam_inference.job.state import STATE_FOLDER
from beam_inference.view.multiscale import with_draft_version
from beam_inference.volumes.packed_blocks import PACKED_SUFFIXES, unpack_block

StateAt = Callable[[str], Json]
"""Function from BASE to a state as JSON values, in which folder NAME is at ``BASE/NAME``."""

_LARGEST_BLOCK = 1 << 28
"""Bytes that a packed block may have, and unpack to."""

_LARGEST_METADATA = 1 << 24
"""Bytes of metadata that are changed here before they are sent."""

_UNPACKED_HERE = set(PACKED_SUFFIXES) - {".gz"}

_EVERYWHERE = ("", "0.0.0.0", "::")


def serve(
    client: Path,
    folders: Mapping[str, Path],
    state: StateAt,
    bind: str,
    port: int,
    listening: Callable[[str], None],
) -> None:
    """Serve until interrupted (SIGINT, or SIGTERM where it is as that).

    Args:
        client: Neuroglancer's client, a folder.
        folders: what is served, by names that can stand in a URL.
        state: asked anew whenever the viewer is opened.
        bind: the address to listen on.
        port: 0 for any that is free.
        listening: called once, with the viewer's URL.

    Raises:
        ConfigError: there is no such address, or the port is taken.
    """
    application, token = viewer_application(client, folders, state)
    try:
        listener = socket.create_server(
            (bind, port), family=socket.AF_INET6 if ":" in bind else socket.AF_INET
        )
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {bind}:{port}: {error}. Choose another --port (0: any that is "
            "free), or another --bind."
        ) from None

    async def serve_forever() -> None:
        server = HTTPServer(application)
        listener.setblocking(False)
        server.add_sockets([listener])
        host = socket.gethostname() if bind in _EVERYWHERE else bind
        host = f"[{host}]" if ":" in host else host
        listening(f"http://{host}:{listener.getsockname()[1]}/{token}/")
        await asyncio.Event().wait()

    try:
        asyncio.run(serve_forever())
    except KeyboardInterrupt:
        pass
    finally:
        listener.close()


def viewer_application(
    client: Path, folders: Mapping[str, Path], state: StateAt
) -> tuple[tornado.web.Application, str]:
    """All that is served, and the token under which it is: the viewer is at ``/TOKEN/``."""
    token = secrets.token_urlsafe(16)
    volumes = [
        (f"/{token}/data/{name}/(.*)", _Volume, {"path": str(folder.resolve())})
        for name, folder in folders.items()
    ]
    application = tornado.web.Application(
        [
            *volumes,
            (f"/{token}/?", _Entrance, {"token": token}),
            (f"/{token}/state.json", _State, {"token": token, "state": state}),
            (
                f"/{token}/v/_/(.*)",
                _Client,
                {"path": str(client), "default_filename": "index.html"},
            ),
            (f"/{token}/events/_", _Events),
            ("/favicon.ico", _Nothing),
        ],
        log_function=lambda _: None,
    )
    return application, token


class _Entrance(tornado.web.RequestHandler):
    """Redirect to the client, whose state is at the host and port that the browser asked for."""

    def initialize(self, token: str) -> None:
        self._token = token

    def get(self) -> None:
        base = f"{self.request.protocol}://{self.request.host}/{self._token}"
        self.redirect(f"{base}/v/_/#!{base}/state.json")


class _State(tornado.web.RequestHandler):
    def initialize(self, token: str, state: StateAt) -> None:
        self._token = token
        self._state = state

    async def get(self) -> None:
        base = f"{self.request.protocol}://{self.request.host}/{self._token}/data"
        # it lists the quarantine, perhaps in an object store
        state = await asyncio.to_thread(self._state, base)
        self.set_header("Content-Type", "application/json")
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(state))


class _Events(tornado.web.RequestHandler):
    """Keep a connection open without events, as the client complains if nobody answers."""

    async def get(self) -> None:
        self.set_header("Content-Type", "text/event-stream")
        self.set_header("Cache-Control", "no-store")
        self._gone = asyncio.Event()
        await self.flush()
        with suppress(asyncio.CancelledError):  # the server ends
            await self._gone.wait()

    def on_connection_close(self) -> None:
        self._gone.set()


class _Nothing(tornado.web.RequestHandler):
    """An empty answer to what every browser requests, so that its console stays clean."""

    def get(self) -> None:
        self.set_status(204)


class _Client(tornado.web.StaticFileHandler):
    """The files of Neuroglancer's client, whose names change with their content."""


def _unpack(file: Path) -> bytes:
    try:
        return bytes(unpack_block(_read(file, _LARGEST_BLOCK), file.suffix, _LARGEST_BLOCK))
    except (ValueError, OSError):
        raise tornado.web.HTTPError(500, f"{file} cannot be unpacked") from None


def _draft(file: Path) -> bytes:
    return with_draft_version(_read(file, _LARGEST_METADATA))


def _read(file: Path, most: int) -> bytes:
    """Read a file, unless it has more bytes than so many, as a file of holes may have."""
    size = file.stat().st_size
    if size > most:
        raise tornado.web.HTTPError(500, f"{file} has {size:,} bytes: more than {most:,}")
    return file.read_bytes()


class _Volume(tornado.web.StaticFileHandler):
    """Serve files of a volume, or byte ranges; packed blocks as a viewer reads them.

    Those kept as ``.gz`` are sent as they are, others are unpacked here: browsers that take them
    do so over HTTPS alone.
    """

    def set_default_headers(self) -> None:
        self.set_header("Access-Control-Allow-Origin", "*")
        self.set_header("Access-Control-Allow-Headers", "range")
        self.set_header(
            "Access-Control-Expose-Headers", "content-range, content-length, content-encoding"
        )
        self.set_header("Access-Control-Allow-Methods", "GET, HEAD, OPTIONS")
        # a volume may hold anything, and is no page
        self.set_header("X-Content-Type-Options", "nosniff")
        # a job may write a block anew: ask, by ETag, whether it has
        self.set_header("Cache-Control", "no-cache")

    def options(self, *_: str) -> None:
        self.set_status(204)

    async def get(self, path: str, include_body: bool = True) -> None:
        """Also of a group of arrays what older clients understand."""
        self.path = self.parse_url_path(path)
        self.absolute_path = self.validate_absolute_path(
            self.root, self.get_absolute_path(self.root, self.path)
        )
        file = Path(self.absolute_path)
        if Path(path).name == "zarr.json":
            self.set_header("Content-Type", "application/json")
            self.finish(await asyncio.to_thread(_draft, file))
        elif file.suffix in _UNPACKED_HERE and file.suffix != Path(path).suffix:
            self.set_header("Content-Type", "application/octet-stream")
            self.finish(await asyncio.to_thread(_unpack, file))
        else:
            await super().get(path, include_body)

    def validate_absolute_path(self, root: str, absolute_path: str) -> str:
        """The file to send; 404 for whatever is not a regular file of the volume."""
        requested = Path(absolute_path)
        packed = (requested.with_name(f"{requested.name}{suffix}") for suffix in PACKED_SUFFIXES)
        for path in (requested, *packed):
            try:
                real = path.resolve(strict=True)
                within = real.relative_to(Path(root).resolve())
            except (OSError, ValueError, RuntimeError):
                continue
            if real.is_file() and STATE_FOLDER not in within.parts:
                if path is not requested and path.suffix == ".gz":
                    self.set_header("Content-Encoding", "gzip")
                    # of decoded bytes, which are not at hand
                    self.request.headers.pop("Range", None)
                return str(real)
        raise tornado.web.HTTPError(404)

    def get_content_type(self) -> str:
        """JSON, or bytes: names of blocks say nothing."""
        json_names = ("info", ".zarray", ".zattrs", ".zgroup", ".zmetadata")
        name = Path(self.path).name
        return (
            "application/json"
            if name in json_names or name.endswith(".json")
            else "application/octet-stream"
        )

    def compute_etag(self) -> str:
        """ETag from size and time of change: hashing a shard would read all of it."""
        status = Path(self.absolute_path or "").stat()
        return f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
