"""Who works on a job: claims on stretches of its chunks, and signs of life.

Claims are an economy: they keep launches from doing the same chunks. Only receipts prove that
chunks are done, and what is done twice has the same bytes, so a claim that is lost, torn or taken
over costs time and nothing else. They are written without waiting for the disk.

No clocks are compared. A worker changes its sign of life every few seconds; whoever waits for it
measures by its own monotonic clock how long that has not changed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorstore as ts
from pydantic import Field, ValidationError

from beam_inference.config.fields import Frozen, SafeLine
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError
from beam_inference.job.records import Count
from beam_inference.job.seals import open_record, seal_record
from beam_inference.volumes.conditional_writes import create_key, delete_value, replace_value
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    KvStore,
    LinkGuard,
    retry_request,
)

_LOOK_SECONDS = 0.5
_NUMBER = re.compile(rb"/(\d{12})\.json$")
_WORKER = re.compile(rb"^workers/([A-Za-z0-9-]{1,64})\.json$")


_SHORTEST = 1e-3
"""Seconds after which a worker has a rate."""


class SignOfLife(Frozen):
    """What a worker tells of itself every few seconds.

    Attributes:
        beat: number of the sign; a higher one each time.
        launch: the launch that it works for.
        host: its machine.
        pid: its process there.
        engine: what runs the network there.
        device: on which device.
        versions: of this package and of Beam.
        chunks: chunks that it has done, or of which it has computed the patches.
        seconds: since its first claim.
    """

    beat: Count
    launch: SafeLine
    host: SafeLine
    pid: Count
    engine: SafeLine
    device: SafeLine
    versions: SafeLine
    chunks: Count
    seconds: float = Field(ge=0, le=1e11)

    @property
    def chunks_per_second(self) -> float | None:
        """Chunks per second since its first claim; None before the first chunk."""
        return self.chunks / self.seconds if self.chunks and self.seconds > _SHORTEST else None


class _ClaimRecord(Frozen):
    """A claim as it is stored; the worker's name is part of a key."""

    worker: str = Field(pattern=r"^[A-Za-z0-9-]{1,64}$")


class _ClaimLength(Frozen):
    """How many chunks are claimed at once, in one job."""

    length: int = Field(ge=1)


@dataclass(frozen=True, slots=True)
class FoundClaim:
    """A claim of another worker.

    Attributes:
        worker: the worker; empty if the claim is damaged.
        generation: of the content that was read.
    """

    worker: str
    generation: bytes


class CrewRecords:
    """The claims and the signs of life in a job's state folder.

    A request that fails in a way that may pass is repeated; then WorkerFault is raised.

    Args:
        store: the folder's key-value store.
        url: its URL.
        storage: the settings that it was opened with.
        key: name of the folders of records of the job, :attr:`ResolvedJob.records_key`.
    """

    def __init__(self, store: KvStore, url: str, storage: Storage, key: str) -> None:
        self._store = store
        self._url = url
        self._storage = storage
        self._folder = f"claims/{key[:16]}"
        self._guard = LinkGuard(url)

    def agree_on_length(self, length: int) -> int:
        """Propose how many chunks are claimed at once; return what the first launch proposed."""
        key = f"{self._folder}/length.json"
        text = seal_record(_ClaimLength(length=length).model_dump_json())
        self._request("write", key, lambda: create_key(self._store, key, self._url, text))
        found = self._read(key)
        with suppress(StateError, ValidationError):
            if found.state == "value":
                return _ClaimLength.model_validate_json(open_record(found.value)).length
        return length  # torn: stretches then differ, and some chunks are done twice

    def claim(self, stage: str, length: int, number: int, worker: str) -> bool:
        """Claim a stretch of chunks that nobody has claimed; return whether that succeeded."""
        key = self._key(stage, length, number)
        text = _ClaimRecord(worker=worker).model_dump_json()
        if self._request(
            "write", key, lambda: create_key(self._store, key, self._url, text, durable=False)
        ):
            return True
        # An attempt may have succeeded whose answer was lost.
        found = self.find_claim(stage, length, number)
        return found is not None and found.worker == worker

    def find_claim(self, stage: str, length: int, number: int) -> FoundClaim | None:
        """Find out who has claimed a stretch; None if nobody has."""
        found = self._read(self._key(stage, length, number))
        if found.state != "value":
            return None
        worker = ""
        with suppress(ValidationError):
            worker = _ClaimRecord.model_validate_json(found.value).worker
        return FoundClaim(worker, found.stamp.generation)

    def take_over(
        self, stage: str, length: int, number: int, claim: FoundClaim, worker: str
    ) -> bool:
        """Take a claim over, unless it has changed since it was found; whether that succeeded."""
        key = self._key(stage, length, number)
        text = _ClaimRecord(worker=worker).model_dump_json()
        return bool(
            self._request(
                "write",
                key,
                lambda: replace_value(self._store, key, self._url, text, claim.generation),
            )
        )

    def release(self, stage: str, length: int, number: int, worker: str) -> None:
        """Give a claim back, unless another worker has taken it over."""
        found = self.find_claim(stage, length, number)
        if found is not None and found.worker == worker:
            key = self._key(stage, length, number)
            self._request(
                "write", key, partial(delete_value, self._store, key, self._url, found.generation)
            )

    def claimed_numbers(self, stage: str, length: int, start: int, stop: int) -> set[int]:
        """List the stretches of ``start … stop`` that are claimed."""
        keys = ts.KvStore.KeyRange(self._key(stage, length, start), self._key(stage, length, stop))
        listed = self._request(
            "list", self._folder, partial(list_keys, self._store, self._storage, keys)
        )
        numbers = {int(match[1]) for match in map(_NUMBER.search, listed) if match}
        # copies may lie in folders of their own
        return {each for each in numbers if self._key(stage, length, each).encode() in listed}

    def begin_once(self, name: str) -> bool:
        """Begin something that one worker does for all; whether this one is to do it."""
        key = f"once/{name}.begun"
        return bool(
            self._request("write", key, lambda: create_key(self._store, key, self._url, ""))
        )

    def end_once(self, name: str) -> None:
        """Note that what was begun for all is done."""
        key = f"once/{name}.done"
        self._request("write", key, lambda: create_key(self._store, key, self._url, ""))

    def wait_for_end(self, name: str, patience: float) -> None:
        """Wait until another worker has done what it began; no longer than ``patience`` seconds."""
        end = time.monotonic() + patience
        while self._read(f"once/{name}.done").state != "value" and time.monotonic() < end:
            time.sleep(_LOOK_SECONDS)

    def forget_all(self) -> None:
        """Delete all claims and signs of life, of a job that is done.

        Killed workers leave them behind. A worker that still lives gives another sign.
        """
        delete_folder(self._url, self._storage, f"{self._folder}/")
        delete_folder(self._url, self._storage, "workers/")

    def give_sign(self, worker: str, sign: SignOfLife) -> None:
        """Write a worker's sign of life."""
        key = _worker_key(worker)
        text = sign.model_dump_json()
        self._request(
            "write", key, lambda: self._store.write(key, text).result(timeout=PATIENCE_SECONDS)
        )

    def read_sign(self, worker: str) -> bytes:
        """Read a worker's sign of life as it is stored; empty if there is none."""
        found = self._read(_worker_key(worker))
        return bytes(found.value) if found.state == "value" else b""

    def remove_sign(self, worker: str) -> None:
        """Remove a worker's sign of life, as it has nothing to do any more."""
        key = _worker_key(worker)
        self._request(
            "write", key, lambda: self._store.write(key, None).result(timeout=PATIENCE_SECONDS)
        )

    def forget_launch(self, launch: str) -> None:
        """Remove the signs of life of a launch that has ended."""
        for worker in self._list_workers():
            if worker.startswith(f"{launch}-"):
                self.remove_sign(worker)

    def read_signs(self) -> dict[str, SignOfLife]:
        """Read all signs of life that can be understood, by worker."""
        signs = {}
        for worker, stored in self.read_stored_signs().items():
            with suppress(ValidationError):
                signs[worker] = SignOfLife.model_validate_json(stored)
        return signs

    def read_stored_signs(self) -> dict[str, bytes]:
        """Read all signs of life as they are stored, by worker."""
        return {worker: self.read_sign(worker) for worker in self._list_workers()}

    def _list_workers(self) -> list[str]:
        keys = ts.KvStore.KeyRange("workers/", "workers0")  # "0" comes after "/"
        listed = self._request(
            "list", "workers", partial(list_keys, self._store, self._storage, keys)
        )
        return sorted(match[1].decode() for match in map(_WORKER.match, listed) if match)

    def _key(self, stage: str, length: int, number: int) -> str:
        return f"{self._folder}/{stage}/{length}/{number:012d}.json"

    def _read(self, key: str) -> Any:
        return self._request(
            "read", key, lambda: self._store.read(key).result(timeout=PATIENCE_SECONDS)
        )

    def _request(self, what: str, key: str, action: Callable[[], Any]) -> Any:
        if what == "write":
            self._guard.check(key)
        return retry_request(what, f"{self._url}/{key}", action)


def _worker_key(worker: str) -> str:
    return f"workers/{worker}.json"


class SilenceWatch:
    """Finds out which workers have given no sign of life for some time, by its own clock.

    A sign that is gone is no new one. A worker that never gave one counts as silent since the watch
    began: each gives one before it claims anything.

    Args:
        patience: seconds without a new sign after which a worker is silent.
        clock: the time in seconds, from any beginning.
    """

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience = patience
        self._clock = clock
        self._latest: dict[str, tuple[bytes, float]] = {}
        self._begin: float | None = None

    def begin(self, signs: Callable[[], Mapping[str, bytes]]) -> None:
        """Begin to watch all workers, unless that was done: many may have been killed at once.

        Args:
            signs: reads the signs of all workers.
        """
        if self._begin is None:
            self._begin = self._clock()
            for worker, sign in signs().items():
                self.is_silent(worker, sign)

    def is_silent(self, worker: str, sign: bytes) -> bool:
        """Note a worker's sign as it is now; whether it has been the same for too long."""
        now = self._clock()
        begin = now if self._begin is None or sign else self._begin
        before, since = self._latest.setdefault(worker, (sign, begin))
        if sign and sign != before:
            self._latest[worker] = (sign, now)
            return False
        return now - since >= self._patience
