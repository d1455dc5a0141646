"""The state folder of a job: the resolved job, receipts, quarantine, and each launch's notes.

::

    job.json                                  the resolved job, written once, at first launch
    receipts/FINGERPRINT/000000000/000000000012.json      chunk 12 is durably written; folders of
    4096 sums/FINGERPRINT/000000000/000000000012.json          seams: exchange: the patches of chunk
    12 are computed seams/FINGERPRINT/000000000/000000000012/…            sums that chunk 12 is made
    of, until it has its receipt quarantine/FINGERPRINT/000000000/000000000013.json    chunk 13
    could not be done; a receipt supersedes it quarantine.jsonl                          what is
    quarantined at the end of a launch, to give to --chunks launches/<id>.started
    when and where this launch began launches/<id>.chunks                      which chunks this
    launch does, where it is a sample launches/<id>.stop                        asks this launch's
    workers to start no further chunk launches/<id>.json                        how this launch
    ended

Receipts lie under the fingerprint of their job, so that a listing is proof: a worker of another job
    that still runs, or a state folder put together by hand, cannot make a chunk count as done.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import tensorstore as ts
from pydantic import ValidationError

from beam_inference.config.job import JobConfig
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER, ChunkEntries
from beam_inference.job.records import Entry, LaunchNote, LaunchSummary, QuarantineRecord, Receipt
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.volumes.kvstores import (
    LOCAL,
    PATIENCE_SECONDS,
    delete_folder,
    open_kvstore,
    persistently,
)


class StopRequest:
    """Whether a launch was asked to stop; looked up once a second at most: a request to the store is not free."""

    def __init__(self, state: State, launch: str) -> None:
        self._state = state
        self._launch = launch
        self._asked = False
        self._known_until = 0.0

    def __call__(self) -> bool:
        """Asked before every chunk."""
        if time.monotonic() >= self._known_until and not self._asked:
            self._asked = self._state.stop_requested(self._launch)
            self._known_until = time.monotonic() + 1
        return self._asked


class State:
    """The state folder at a URL, through a TensorStore key-value store; every method is one or a few requests.

    What is of one job (receipts, quarantine) is reached through :meth:`of`. Requests that fail in a
    way that may pass are tried again, with backoff.
    """

    def __init__(self, url: str, storage: Storage = LOCAL, fingerprint: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._storage = storage
        self._store = open_kvstore(self.url, storage)
        self._fingerprint = fingerprint

    def of(self, job: ResolvedJob) -> State:
        """The same folder, with the receipts and the quarantine of one job."""
        return State(self.url, self._storage, job.fingerprint)

    def load_job(self) -> ResolvedJob | None:
        """The resolved job, or None before the first launch.

        Raises:
            StateError: job.json cannot be understood.
        """
        text = self._read("job.json")
        if text is None:
            return None
        try:
            return ResolvedJob.model_validate_json(text)
        except ValidationError as error:
            raise StateError(
                f"{self.url}/job.json cannot be understood ({error.error_count()} faults, the "
                f"first: {error.errors()[0]['msg']}): it is damaged or from another version. "
                "Remove the state folder (with --overwrite) to start anew."
            ) from None

    def create_job(self, job: ResolvedJob) -> ResolvedJob:
        """Write job.json if absent; the one that is there in the end, which a racing launch may have written."""
        there = self._request(
            "read",
            "job.json",
            lambda: self._store.read("job.json").result(timeout=PATIENCE_SECONDS),
        )
        if there.state != "value":
            self._write("job.json", job.model_dump_json(indent=1), if_equal=there.stamp.generation)
        return self.load_job() or job

    def write_receipt(self, receipt: Receipt) -> None:
        """Write a receipt, durably; replaces one of the same chunk."""
        self._entries("receipts").write(receipt.chunk, receipt.model_dump_json())

    def read_receipt(self, chunk: int) -> Receipt | None:
        """The receipt of a chunk, or None."""
        return next(self._read_entries(Receipt, "receipts", [chunk]), None)

    def receipts(
        self, start: int, stop: int, damaged: list[str] | None = None
    ) -> Iterator[Receipt]:
        """All receipts of chunks ``start … stop``, in order; read concurrently, a folder at a time.

        Those that cannot be understood raise StateError, or are told of in ``damaged``.
        """
        for first in range(start, stop, CHUNKS_PER_FOLDER):
            indices = self.receipt_indices(first, min(stop, first + CHUNKS_PER_FOLDER))
            yield from self._read_entries(Receipt, "receipts", indices, damaged)

    def read_receipts(
        self, chunks: Sequence[int], damaged: list[str] | None = None
    ) -> list[Receipt]:
        """The receipts of some chunks, as far as there are any; read concurrently; ``damaged`` as for receipts."""
        return list(self._read_entries(Receipt, "receipts", chunks, damaged))

    def receipt_indices(self, start: int, stop: int) -> Iterator[int]:
        """Which of the chunks ``start … stop`` have a receipt, in order. Lists folders, some at a time."""
        return self._entries("receipts").indices(start, stop)

    def count_receipts(self, start: int, stop: int) -> int:
        """How many of the chunks ``start … stop`` have a receipt. Lists; reads nothing."""
        return self._entries("receipts").count(start, stop)

    def write_sums(self, receipt: Receipt) -> None:
        """Record, durably, that a chunk's patches are computed, and their sums kept for who needs them."""
        self._entries("sums").write(receipt.chunk, receipt.model_dump_json())

    def read_sums(self, chunks: Sequence[int]) -> list[Receipt]:
        """Of those among some chunks whose patches are computed; damaged ones count as none. Read concurrently."""
        return list(self._read_entries(Receipt, "sums", chunks, []))

    def sums_indices(self, start: int, stop: int) -> Iterator[int]:
        """Which of the chunks ``start … stop`` have their patches computed, as :meth:`receipt_indices` says it."""
        return self._entries("sums").indices(start, stop)

    def count_sums(self, start: int, stop: int) -> int:
        """How many of the chunks ``start … stop`` have their patches computed. Lists; reads nothing."""
        return self._entries("sums").count(start, stop)

    def quarantine_indices(self, start: int, stop: int) -> list[int]:
        """Which of the chunks ``start … stop`` have a quarantine record, in order. One listing: they are few."""
        return self._entries("quarantine").few_indices(start, stop)

    def write_quarantine(self, record: QuarantineRecord) -> None:
        """Record a chunk that could not be done."""
        self._entries("quarantine").write(record.chunk, record.model_dump_json())

    def read_quarantine(self, chunks: Sequence[int]) -> list[QuarantineRecord]:
        """The quarantine records of some chunks, as far as there are any, superseded ones as well."""
        return list(self._read_entries(QuarantineRecord, "quarantine", chunks))

    def quarantined(self, start: int, stop: int) -> Iterator[QuarantineRecord]:
        """Quarantine records of chunks ``start … stop`` that no receipt supersedes, in order."""
        indices = self.quarantine_indices(start, stop)
        for first in range(0, len(indices), CHUNKS_PER_FOLDER):
            some = indices[first : first + CHUNKS_PER_FOLDER]
            done = {receipt.chunk for receipt in self.read_receipts(some)}
            yield from self._read_entries(
                QuarantineRecord, "quarantine", [i for i in some if i not in done]
            )

    def write_quarantine_file(self, records: list[QuarantineRecord]) -> None:
        """Write ``quarantine.jsonl``, one record a line; removes it if there are none."""
        lines = "".join(record.model_dump_json() + "\n" for record in records)
        self._write("quarantine.jsonl", lines or None)

    def note_start(self, launch: str) -> None:
        """Record that a launch begins; also shows whether the folder can be written."""
        self._write(
            f"launches/{launch}.started", f"{datetime.now(UTC).isoformat()} {platform.node()}\n"
        )

    def write_chunks(self, launch: str, chunks: Sequence[int]) -> None:
        """Record which chunks a launch does, where it does not do all; read at :meth:`chunks_url`."""
        self._write(f"launches/{launch}.chunks", "".join(f"{chunk}\n" for chunk in chunks))

    def chunks_url(self, launch: str) -> str:
        """Where :meth:`write_chunks` writes."""
        return f"{self.url}/launches/{launch}.chunks"

    def request_stop(self, launch: str) -> None:
        """Ask the workers of a launch, wherever they are, to start no further chunk."""
        self._write(f"launches/{launch}.stop", "")

    def stop_requested(self, launch: str) -> bool:
        """Whether :meth:`request_stop` was called for a launch, as far as the folder can be read."""
        try:
            return self._read(f"launches/{launch}.stop") is not None
        except WorkerFault:
            return False

    def write_summary(self, launch: str, summary: LaunchSummary) -> None:
        """Record how a launch ended."""
        self._write(f"launches/{launch}.json", summary.model_dump_json())

    def read_summary(self, launch: str) -> LaunchSummary | None:
        """How a launch ended, or None if it did not."""
        return self._entry(LaunchSummary, f"launches/{launch}.json")

    def launches(self) -> list[LaunchNote]:
        """All launches, the first first."""
        keys = ts.KvStore.KeyRange("launches/", "launches0")  # "0" comes after "/"
        listed = self._request(
            "list", "launches", lambda: self._store.list(keys).result(timeout=PATIENCE_SECONDS)
        )
        names = {key.decode() for key in listed}
        notes = []
        for name in names:
            launch, _, kind = name.removeprefix("launches/").partition(".")
            if kind == "started":
                started, _, node = (self._read(name) or b"").decode().strip().partition(" ")
                stopped = f"launches/{launch}.stop" in names
                summary = self.read_summary(launch)
                with suppress(ValueError):  # one that was killed while it wrote this
                    notes.append(
                        LaunchNote(
                            launch=launch,
                            started=datetime.fromisoformat(started),
                            node=node,
                            stopped=stopped,
                            summary=summary,
                        )
                    )
        return sorted(notes, key=lambda note: note.started)

    def clear(self) -> None:
        """Delete what this class has written, of all jobs, and nothing else; job.json last."""
        for folder in ("receipts/", "sums/", "seams/", "quarantine/", "launches/"):
            delete_folder(self._store, self.url, folder)
        for key in ("quarantine.jsonl", "job.json"):
            self._write(key, None)

    def _entries(self, folder: str) -> ChunkEntries:
        if self._fingerprint is None:
            raise ValueError("receipts are of one job: use state.of(job)")
        return ChunkEntries(self._store, self.url, f"{folder}/{self._fingerprint[:16]}")

    def _read(self, key: str) -> bytes | None:
        result = self._request(
            "read", key, lambda: self._store.read(key).result(timeout=PATIENCE_SECONDS)
        )
        return bytes(result.value) if result.state == "value" else None

    def _write(self, key: str, text: str | None, if_equal: bytes | None = None) -> None:
        self._request(
            "write",
            key,
            lambda: self._store.write(key, text, if_equal=if_equal).result(
                timeout=PATIENCE_SECONDS
            ),
        )

    def _request(self, what: str, key: str, action: Callable[[], Any]) -> Any:
        return persistently(what, f"{self.url}/{key}", action)

    def _entry(self, kind: type[Entry], key: str) -> Entry | None:
        text = self._read(key)
        return None if text is None else self._parse(kind, key, text)

    def _parse(self, kind: type[Entry], key: str, text: bytes) -> Entry:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise StateError(
                f"{self.url}/{key} cannot be understood ({error.errors()[0]['msg']}): it is "
                "damaged or from another version. Delete this one file; its chunk is then done "
                "again."
            ) from None

    def _read_entries(
        self,
        kind: type[Entry],
        folder: str,
        chunks: Iterable[int],
        damaged: list[str] | None = None,
    ) -> Iterator[Entry]:
        for key, text in self._entries(folder).read(chunks):
            try:
                yield self._parse(kind, key, text)
            except StateError as error:
                if damaged is None:
                    raise
                damaged.append(str(error))


STATE_FOLDER = "_beam_inference"
"""Where in its output a job's state is, unless it says otherwise."""


def default_state_url(config: JobConfig) -> str:
    """Where a job's state is: ``job.state_path``, or beside its output."""
    return config.job.state_path or f"{config.output.path.rstrip('/')}/{STATE_FOLDER}"
