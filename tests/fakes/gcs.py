"""Google Cloud Storage's JSON API on localhost, from memory, with injected failures.

In a test: `with GcsStandIn(["bucket"], fail_rate=0.2) as gcs: …`, with STORAGE_EMULATOR_HOST (for
    Beam and google-cloud-storage) or TENSORSTORE_GCS_HTTP_URL (for TensorStore, before its first
    use in a process) set to `gcs.url`.
For other processes: `PYTHONPATH=tests python -m fakes.gcs --port 4443 bucket`; URL/_counts then
    tells its counts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from urllib.parse import unquote

from fakes.gcs_objects import Content, GcsError, Json, ObjectStore, Query, StoredObject
from fakes.http_stand_in import (
    HttpStandIn,
    Request,
    Response,
    parse_headers,
    split_head,
    split_multipart,
)

AFTER_SHARE = 0.3  # of the injected failures: carried out, yet answered 503

_BUCKET = r"/b/(?P<bucket>[^/]+)"
_OBJECT = r"/o/(?P<name>[^/]+)"
_TARGET = r"/b/(?P<to_bucket>[^/]+)/o/(?P<to_name>[^/]+)"
ROUTES = [  # methods, path, kind of request as counted; the API's method _KIND serves it
    ("POST|PUT|DELETE", rf"(?:/resumable)?/upload/storage/v1{_BUCKET}/o", "upload"),
    ("POST", r"/batch(?:/storage/v1)?", "batch"),
    ("GET|POST", r"/storage/v1/b/?", "buckets"),
    ("GET|HEAD", rf"/storage/v1{_BUCKET}/?", "bucket"),
    ("GET", rf"/storage/v1{_BUCKET}/o/?", "list"),
    ("POST", rf"/storage/v1{_BUCKET}{_OBJECT}/rewriteTo{_TARGET}", "rewrite"),
    ("POST", rf"/storage/v1{_BUCKET}{_OBJECT}/copyTo{_TARGET}", "copy"),
    ("POST", rf"/storage/v1{_BUCKET}{_OBJECT}/compose", "compose"),
    (
        "GET|HEAD|DELETE|PATCH|PUT",
        rf"(?:/download)?/storage/v1{_BUCKET}(?P<object>/o/(?P<name>.+))",
        "object",
    ),
]


@dataclass
class ResumableUpload:
    """An upload session."""

    bucket: str
    name: str
    claimed: Json
    query: Query
    data: bytearray = field(default_factory=bytearray)
    done: StoredObject | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


def media_response(found: StoredObject, request: Request) -> Response:
    """An object's bytes, or the range of them that was asked for."""
    data = found.data
    encoding = found.properties.get("contentEncoding", "")
    headers = {
        "Content-Type": found.properties.get("contentType", "application/octet-stream"),
        "ETag": f'"{found.generation}"',
        "Accept-Ranges": "bytes",
        "X-Goog-Generation": str(found.generation),
        "X-Goog-Metageneration": str(found.metageneration),
        "X-Goog-Hash": f"crc32c={found.content.crc32c},md5={found.content.md5}",
        "X-Goog-Stored-Content-Length": str(len(data)),
        "X-Goog-Stored-Content-Encoding": encoding or "identity",
    }
    if encoding == "gzip" and "gzip" not in request.header("Accept-Encoding"):
        # a decompressed object is always sent whole
        return Response(200, gzip.decompress(data), headers)
    if encoding:
        headers["Content-Encoding"] = encoding
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.header("Range"))
    if asked is None or not any(asked.groups()):
        return Response(200, data, headers)
    first, last = asked.groups()
    start = int(first) if first else max(0, len(data) - int(last))
    stop = min(int(last) + 1, len(data)) if first and last else len(data)
    if start >= stop:
        return Response(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
    return Response(206, data[start:stop], headers)


def error_response(status: int, reason: str, message: str) -> Response:
    """An error as the JSON API words it."""
    details = [{"message": message, "domain": "global", "reason": reason}]
    if status == 304:
        return Response(304)
    return Response.of_json(
        {"error": {"code": status, "message": message, "errors": details}}, status
    )


class GcsApi:
    """What each request of the JSON API does to a store."""

    def __init__(self, store: ObjectStore, answer: Callable[[Request], Response]) -> None:
        self._store = store
        self._answer = answer  # for the parts of a batch
        self._uploads: dict[str, ResumableUpload] = {}

    def serve(self, kind: str, request: Request, names: dict[str, str]) -> Response:
        """Carries out one request."""
        serve: Callable[[Request, dict[str, str]], Response] = getattr(self, f"_{kind}")
        return serve(request, names)

    def _buckets(self, request: Request, names: dict[str, str]) -> Response:
        if request.method == "POST":
            self._store.create_bucket(request.json()["name"])
            return Response.of_json(self._bucket_resource(request.json()["name"]))
        items = [self._bucket_resource(name) for name in sorted(self._store.buckets)]
        return Response.of_json({"kind": "storage#buckets", "items": items})

    def _bucket(self, request: Request, names: dict[str, str]) -> Response:
        self._store.objects(names["bucket"])
        return Response.of_json(self._bucket_resource(names["bucket"]))

    @staticmethod
    def _bucket_resource(name: str) -> Json:
        policy = {"retentionDurationSeconds": "0"}
        fixed = {
            "kind": "storage#bucket",
            "projectNumber": "1",
            "metageneration": "1",
            "location": "US",
        }
        return {
            **fixed,
            "id": name,
            "name": name,
            "storageClass": "STANDARD",
            "softDeletePolicy": policy,
        }

    def _list(self, request: Request, names: dict[str, str]) -> Response:
        for unknown in {"matchGlob", "versions", "softDeleted", "includeTrailingDelimiter"} & set(
            request.query
        ):
            if request.query[unknown] != "false":
                raise NotImplementedError(f"list with {unknown}={request.query[unknown]}")
        return Response.of_json(self._store.list(names["bucket"], request.query))

    def _object(self, request: Request, names: dict[str, str]) -> Response:
        bucket = names["bucket"]
        name = names["name"]
        query = request.query
        if request.method == "DELETE":
            self._store.delete(bucket, name, query)
            return Response(204)
        if request.method in ("PATCH", "PUT"):
            return Response.of_json(
                self._store.patch(bucket, name, request.json(), query).resource(bucket, name)
            )
        found = self._store.read(bucket, name, query)
        if query.get("alt") == "media":
            return media_response(found, request)
        return Response.of_json(found.resource(bucket, name))

    def _copy(self, request: Request, names: dict[str, str]) -> Response:
        source = (names["bucket"], names["name"])
        target = (names["to_bucket"], names["to_name"])
        made = self._store.copy(source, target, request.json(), request.query)
        return Response.of_json(made.resource(*target))

    def _rewrite(self, request: Request, names: dict[str, str]) -> Response:
        resource = json.loads(self._copy(request, names).body)
        sizes = {"objectSize": resource["size"], "totalBytesRewritten": resource["size"]}
        return Response.of_json(
            {"kind": "storage#rewriteResponse", "done": True, **sizes, "resource": resource}
        )

    def _compose(self, request: Request, names: dict[str, str]) -> Response:
        made = self._store.compose(names["bucket"], names["name"], request.json(), request.query)
        return Response.of_json(made.resource(names["bucket"], names["name"]))

    def _batch(self, request: Request, names: dict[str, str]) -> Response:
        boundary = f"batch_{uuid.uuid4().hex}"
        body = b""
        for part_headers, content in split_multipart(request.header("Content-Type"), request.body):
            head, part_body = split_head(content.lstrip())
            line, _, header_lines = head.partition(b"\n")
            method, target, _ = line.decode().split(" ", 2)
            answer = self._answer(Request(method, target, parse_headers(header_lines), part_body))
            identity = str(part_headers.get("Content-ID", "")).strip("<>")
            intro = (
                f"--{boundary}\r\nContent-Type: application/http\r\nContent-ID: "
                f"<response-{identity}>\r\n\r\n"
            )
            body += intro.encode() + answer.head() + answer.body + b"\r\n"
        return Response(
            200,
            body + f"--{boundary}--\r\n".encode(),
            {"Content-Type": f"multipart/mixed; boundary={boundary}"},
        )

    def _upload(self, request: Request, names: dict[str, str]) -> Response:
        bucket = names["bucket"]
        query = request.query
        self._store.objects(bucket)
        if "upload_id" in query:
            return self._continue_upload(request)
        if query.get("uploadType") == "resumable":
            return self._start_upload(request, bucket)
        if query.get("uploadType") == "multipart":
            (_, text), (part_headers, data) = split_multipart(
                request.header("Content-Type"), request.body
            )
            claimed = json.loads(text)
            claimed.setdefault("contentType", part_headers.get("Content-Type"))
        else:
            claimed = {"contentType": request.headers.get("Content-Type")}
            data = request.body
        return self._write(
            bucket,
            claimed.get("name") or query["name"],
            data,
            self._with_hashes(request, claimed),
            query,
        )

    @staticmethod
    def _with_hashes(request: Request, claimed: Json) -> Json:
        names = {"crc32c": "crc32c", "md5": "md5Hash"}
        given = [item.strip().partition("=") for item in request.header("X-Goog-Hash").split(",")]
        return {**claimed, **{names[name]: value for name, _, value in given if name in names}}

    def _write(self, bucket: str, name: str, data: bytes, claimed: Json, query: Query) -> Response:
        made = self._store.write(bucket, name, Content.of(data, claimed), claimed, query)
        return Response.of_json(made.resource(bucket, name))

    def _start_upload(self, request: Request, bucket: str) -> Response:
        claimed = request.json()
        claimed.setdefault("contentType", request.headers.get("X-Upload-Content-Type"))
        name = claimed.get("name") or request.query["name"]
        self._store.check(bucket, name, request.query)
        identity = uuid.uuid4().hex
        self._uploads[identity] = ResumableUpload(bucket, name, claimed, request.query)
        location = f"http://{request.header('Host')}{request.path}?uploadType=resumable&upload_id={identity}"
        return Response(200, b"", {"Location": location, "X-GUploader-UploadID": identity})

    def _continue_upload(self, request: Request) -> Response:
        """Takes a chunk, or tells how much has arrived; what was sent twice counts once."""
        identity = request.query["upload_id"]
        upload = self._uploads.get(identity)
        if upload is None:
            raise GcsError(404, "notFound", f"No such upload: {identity}")
        if request.method == "DELETE":
            self._uploads.pop(identity, None)
            return Response(499)
        with upload.lock:
            if upload.done is None:
                self._take_chunk(upload, request)
            if upload.done is not None:
                return Response.of_json(upload.done.resource(upload.bucket, upload.name))
            headers = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
            return Response(308, b"", headers)

    def _take_chunk(self, upload: ResumableUpload, request: Request) -> None:
        text = request.header("Content-Range")
        described = re.fullmatch(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)", text)
        if text and described is None:
            raise GcsError(400, "invalid", f"Content-Range: {text}")
        first, total = described.groups() if described else ("0", str(len(request.body)))
        start = int(first) if first is not None else len(upload.data)
        if start > len(upload.data):
            raise GcsError(
                400,
                "invalid",
                f"the chunk starts at {start}, but {len(upload.data)} bytes have arrived",
            )
        upload.data += request.body[len(upload.data) - start :]
        if total == str(len(upload.data)):
            content = Content.of(bytes(upload.data), self._with_hashes(request, upload.claimed))
            upload.done = self._store.write(
                upload.bucket, upload.name, content, upload.claimed, upload.query
            )
            upload.data.clear()


class GcsStandIn(HttpStandIn):
    """Serves buckets from memory at `url`, while it is entered.

    Args:
        buckets: Their names, or that of the only one.
        fail_rate: Share of the requests answered 503 or 429; most of them are not carried out, some
            are all the same.
        latency: Seconds that each request takes at least.
        seed: Of the injected failures.
        required_token: Requests without this bearer token are answered 401.
        port: Of localhost; 0 takes a free one.
    """

    def __init__(
        self,
        buckets: str | Iterable[str] = (),
        *,
        fail_rate: float = 0.0,
        latency: float = 0.0,
        seed: int = 0,
        required_token: str | None = None,
        port: int = 0,
    ) -> None:
        super().__init__(port)
        self.requests: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.fail_rate = fail_rate
        self.latency = latency
        self.required_token = required_token
        self._store = ObjectStore([buckets] if isinstance(buckets, str) else buckets)
        self.buckets = self._store.buckets
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._api = GcsApi(self._store, self._answer)

    def put(self, bucket: str, name: str, data: bytes, **properties: object) -> int:
        """Store an object without HTTP, and return its generation.

        Properties are those of the API, such as contentEncoding.
        """
        self.buckets.setdefault(bucket, {})
        return self._store.write(bucket, name, Content.of(data), properties, {}).generation

    def get(self, bucket: str, name: str) -> bytes:
        """An object's bytes, past HTTP."""
        return self.buckets[bucket][name].data

    def names(self, bucket: str, prefix: str = "") -> list[str]:
        """The names of a bucket's objects, sorted."""
        return sorted(name for name in list(self.buckets[bucket]) if name.startswith(prefix))

    def counts(self) -> Json:
        """The requests and the injected failures so far."""
        with self._lock:
            return {
                "requests": dict(self.requests),
                "failures": dict(self.failures),
                "faults": list(self.faults),
            }

    def _receive(self, request: Request) -> Response:
        if request.path == "/_counts":
            return Response.of_json(self.counts())
        if self.latency:
            time.sleep(self.latency)
        if (
            self.required_token is not None
            and request.header("Authorization") != f"Bearer {self.required_token}"
        ):
            return error_response(401, "authError", "Invalid Credentials")
        return self._answer(request)

    def _answer(self, request: Request) -> Response:
        """Answers a request of a connection or of a batch."""
        kind, names = self._route(request)
        label = f"{request.method} {'media' if request.query.get('alt') == 'media' else kind}"
        with self._lock:
            self.requests[label] += 1
        status, carried_out = self._injected(label)
        if status and not carried_out:
            return error_response(status, "backendError", "injected, not carried out")
        response = self._carried_out(kind, request, names)
        return (
            error_response(status, "backendError", "injected, carried out") if status else response
        )

    @staticmethod
    def _route(request: Request) -> tuple[str, dict[str, str]]:
        for methods, path, kind in ROUTES:
            if re.fullmatch(methods, request.method) and (
                match := re.fullmatch(path, request.path)
            ):
                return kind, {key: unquote(value) for key, value in match.groupdict().items()}
        return "unknown", {}

    def _injected(self, label: str) -> tuple[int, bool]:
        """Status of an injected failure, or 0, and whether the request is carried out anyway."""
        with self._lock:
            if self._random.random() >= self.fail_rate:
                return 0, True
            carried_out = self._random.random() < AFTER_SHARE
            status = 503 if carried_out else self._random.choice((503, 429))
            self.failures[f"{label} {status} {'after' if carried_out else 'before'}"] += 1
            return status, carried_out

    def _carried_out(self, kind: str, request: Request, names: dict[str, str]) -> Response:
        try:
            if kind == "unknown":
                raise NotImplementedError("no such route")
            return self._api.serve(kind, request, names)
        except GcsError as error:
            return error_response(error.status, error.reason, str(error))
        except Exception:
            self.faults.append(f"{request.method} {request.target}\n{traceback.format_exc()}")
            return error_response(501, "notImplemented", traceback.format_exc())


def main() -> None:
    """Serves until interrupted."""
    parser = argparse.ArgumentParser(description="Cloud Storage on localhost, from memory")
    parser.add_argument("buckets", nargs="*")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--fail-rate", type=float, default=0.0)
    parser.add_argument("--latency", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--required-token")
    options = vars(parser.parse_args())
    with GcsStandIn(**options) as gcs:
        print(gcs.url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
