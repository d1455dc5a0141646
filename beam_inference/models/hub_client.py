"""Bounds on what a server of Hugging Face's protocol may answer.

``huggingface_hub`` keeps files under the names of commits and contents that the server states,
holds a listing in memory whatever its length, and writes files until the disk is full.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
from huggingface_hub import get_session

from beam_inference.errors import ModelContractError

MOST_LISTING_BYTES = 4 << 20
"""Most bytes of all answers together that are no files: a list of 10,000 files has some 500 KB."""

LONGEST_WAIT_SECONDS = 60
"""How long a server may have this process wait before it asks again; the library waits any time."""

LISTING_SECONDS = 60.0
"""How long such an answer may take."""

MOST_PAGES = 1_000
"""Most answers that are no files: the library follows a listing from page to page without end."""

_COMMIT = re.compile("[0-9a-f]{40}")
_WAIT = re.compile(r"\bt\s*=\s*(\d+)")
_CONTENT = re.compile(r'(W/)?"?\w[\w-]*"?', re.ASCII)


def check_commit(commit: object) -> None:
    """Check the name of a commit. Raises ModelContractError."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise ModelContractError(
            f"the server names the commit {commit!a:.60}: expected 40 hex digits"
        )


def bound_answers(folder: Path) -> None:
    """Bound the answers that ``huggingface_hub`` takes in this process.

    Args:
        folder: where it keeps files, which is there.
    """
    client = get_session()
    hooks = client.event_hooks
    others = [each for each in hooks["response"] if not isinstance(each, _Bounds)]
    client.event_hooks = {**hooks, "response": [_Bounds(folder), *others]}


class _Bounds:
    """Checks the answers for one repository before the library sees them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listings = _Listings()
        self._redirected: set[str] = set()
        """Where listings were said to lie instead."""

    def __call__(self, answer: httpx2.Response) -> None:
        """Check an answer, whose body was not yet read. Raises ModelContractError."""
        headers = answer.headers
        # With it the library leaves a file to Xet, a program that asks servers on its own.
        headers.pop("x-xet-hash", None)
        if "x-repo-commit" in headers:
            check_commit(headers["x-repo-commit"])
        for name in ("etag", "x-linked-etag"):
            if name in headers and not _CONTENT.fullmatch(headers[name]):
                raise ModelContractError(f"the server names a file's content {headers[name]!a:.80}")
        if headers.get("content-encoding", "identity") != "identity":
            raise ModelContractError("the server packs its answer, which was not asked for")
        _check_wait(headers)
        if answer.request.method != "GET":
            return
        is_listing = self._is_listing(answer.request.url)
        if is_listing and "location" in headers:
            self._redirected.add(str(answer.request.url.join(headers["location"])))
        if answer.is_success and not is_listing:
            self._check_file(headers.get("content-length"))
        else:
            self._listings.read(answer)

    def _is_listing(self, url: httpx2.URL) -> bool:
        """Whether a URL is that of a listing; the server's address may have a path of its own."""
        above_files = url.path.partition("/resolve/")[0]
        is_of_api = url.path.startswith("/api/") or "/api/models/" in above_files
        return is_of_api or str(url) in self._redirected

    def _check_file(self, length: str | None) -> None:
        """Check that a file has an end, and a place. Raises ModelContractError."""
        if length is None:
            raise ModelContractError("the server does not say how long a file is")
        free = shutil.disk_usage(self._folder).free
        if int(length) > free:
            raise ModelContractError(f"a file has {int(length):,} bytes, and {free:,} are free")


def _check_wait(headers: httpx2.Headers) -> None:
    """Check how long the server wants to be left alone. Raises ModelContractError."""
    stated = [headers.get("retry-after", ""), *_WAIT.findall(headers.get("ratelimit", ""))]
    longest = max((int(each) for each in stated if each.isdecimal()), default=0)
    if longest > LONGEST_WAIT_SECONDS:
        raise ModelContractError(
            f"the server wants to be asked again in {longest:,} s: give the command again then"
        )


class _Listings:
    """Reads answers that are no files, which are bounded together: they may be pages of a list."""

    def __init__(self) -> None:
        self._pages = 0
        self._bytes_left = MOST_LISTING_BYTES

    def read(self, answer: httpx2.Response) -> None:
        """Read an answer, and check the commit that it names. Raises ModelContractError."""
        self._pages += 1
        if self._pages > MOST_PAGES:
            raise ModelContractError(f"the server's listing has more than {MOST_PAGES:,} pages")
        if isinstance(answer.stream, httpx2.SyncByteStream):
            answer.stream = _Bounded(answer.stream, self._bytes_left)
        content = answer.read()
        self._bytes_left -= len(content)
        try:
            told = json.loads(content)
        except (ValueError, RecursionError):
            return  # which the library tells, as it does an error's page
        if isinstance(told, dict) and answer.is_success and "sha" in told:
            check_commit(told["sha"])


class _Bounded(httpx2.SyncByteStream):
    """A body that ends. It raises ModelContractError where it does not within bounds."""

    def __init__(self, stream: httpx2.SyncByteStream, most_bytes: int) -> None:
        self._stream = stream
        self._most_bytes = most_bytes

    def __iter__(self) -> Iterator[bytes]:
        begin = time.monotonic()
        seen = 0
        for part in self._stream:
            seen += len(part)
            if seen > self._most_bytes:
                raise ModelContractError(
                    f"the server's listing has more than {MOST_LISTING_BYTES:,} bytes"
                )
            if time.monotonic() - begin > LISTING_SECONDS:
                raise ModelContractError(
                    f"the server's listing takes more than {LISTING_SECONDS:g} s"
                )
            yield part

    def close(self) -> None:
        """Close the body beneath."""
        self._stream.close()
