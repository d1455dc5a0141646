"""A web server of files on localhost, which sends parts of them, or whole ones only."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fakes.http_stand_in import HttpStandIn, Request, Response


@dataclass(frozen=True)
class Zeros:
    """The content of a file of zeros, of any size, which is made as it is asked for."""

    size: int

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, part: slice) -> bytes:
        return bytes(len(range(*part.indices(self.size))))


class WebFiles(HttpStandIn):
    """Serves files by their paths, such as "/em.npy", while it is entered; none of them changes.

    Attributes:
        sent: bytes of the answers, by path.
        answers: numbers of the answers, by path.
    """

    def __init__(self, files: Mapping[str, bytes | Zeros], *, has_ranges: bool = True) -> None:
        super().__init__()
        self._files = files
        self._has_ranges = has_ranges
        self.sent: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()

    def _receive(self, request: Request) -> Response:
        content = self._files.get(request.path)
        if content is None:
            return Response(404)
        self.answers[request.path] += 1
        headers = {"ETag": '"one"'}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.header("Range"))
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, len(content)) if asked and asked[2] else len(content)
        if asked is None or not self._has_ranges:
            self.sent[request.path] += len(content)
            return Response(200, content[:], headers)
        if start >= len(content):
            return Response(416, b"", {"Content-Range": f"bytes */{len(content)}"})
        self.sent[request.path] += stop - start
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return Response(206, content[start:stop], headers)
