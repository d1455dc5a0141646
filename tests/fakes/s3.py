"""A stand-in for Amazon S3 on localhost: moto's server with latency and injected failures."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Self

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {
    "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
    "AWS_SECRET_ACCESS_KEY": "planted/secret/0123456789/abcdefghijklmn",
}
"""What a client must have in its environment; moto takes any key, but not none."""


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


class S3StandIn:
    """A server for the duration of a ``with``; ``url`` is its endpoint.

    ``fail_rate`` is the share of requests answered 503 (SlowDown) without being carried out,
    ``latency`` the seconds that are added to each. Where a path holds ``expired``, the answer says
    that the caller's token has expired.
    """

    def __init__(
        self,
        buckets: Iterable[str] = (),
        *,
        fail_rate: float = 0.0,
        latency: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.fail_rate = 0.0
        self.latency = 0.0
        self.expired = ""
        self.requests: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "localhost", 0, self._serve, threaded=True, request_handler=_Quiet
        )
        self.url = f"http://localhost:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        for bucket in buckets:
            self.client().create_bucket(Bucket=bucket)
        self.fail_rate = fail_rate
        self.latency = latency

    def client(self) -> Any:
        """A boto3 client of this server."""
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """All keys of a bucket that begin with a prefix."""
        pages = (
            self.client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        )
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def _serve(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        time.sleep(self.latency)
        with self._lock:
            self.requests[environ["REQUEST_METHOD"]] += 1
            fails = self._random.random() < self.fail_rate
            self.requests["failed"] += fails
        refusal = None
        if self.expired and self.expired in environ["PATH_INFO"]:
            refusal = ("403 Forbidden", "ExpiredToken", "The provided token has expired.")
        elif fails:
            refusal = ("503 Slow Down", "SlowDown", "Please reduce your request rate.")
        if refusal is not None:
            status, code, message = refusal
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
            start_response(status, headers)
            return [body]
        answer: Iterable[bytes] = self._moto(environ, start_response)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
