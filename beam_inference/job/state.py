"""The state folder of a job: the resolved job, receipts, quarantine, and each launch's notes.

============================================  ======================================================
file                                          content
============================================  ======================================================
``job.json``                                  the resolved job, written once, at first launch
``id``                                        a random name of this folder, by which outputs know it
``receipts/FINGERPRINT/000000000/N.json``     proof that chunk N is durably written
``sums/FINGERPRINT/000000000/N.json``         with ``strategy: exchange``, proof that the patches
                                              of chunk N are computed
``former/LAUNCH/FINGERPRINT/000000000/N.json``  receipt that chunk N had before LAUNCH did it again
``seams/FINGERPRINT/000000000/N/…``           sums that chunk N is made of, until it has a receipt
``quarantine/FINGERPRINT/000000000/N.json``   why chunk N could not be done, unless it has a receipt
``quarantine.jsonl``                          what is in quarantine after a launch: for ``--chunks``
``quantized/SHA256``                          with ``precision: int8``, the network that workers run
``shards.json``                               how many shards the job is divided into
``shards/FINGERPRINT/N/000000000/I.json``     that shard I of N has come to its end
``claims/FINGERPRINT/STAGE/LENGTH/N.json``    which worker does the Nth stretch of LENGTH chunks
``workers/ID.json``                           sign of life of a worker that has claims
``once/NAME``                                 what one worker does, or has done, for all
``launches/ID.launch``                        with several volumes, what workers need to know
``launches/ID.started``                       when and where a launch began
``launches/ID.chunks``                        the chunks that a launch does, where only some
``launches/ID.answer``                        until the launcher has read it, what a worker has
                                              found out about the network before ID began
``launches/ID.stop``                          asks a launch's workers to start no further chunk
``launches/ID.json``                          how a launch ended
``fault.json``                                with several volumes, why this one could not be opened
``volumes/NAME/…``                            with several volumes, the state folder of one
============================================  ======================================================

Records of chunks lie in folders of 4096, under the fingerprint of their job (with ``roi.domain``,
under a hash of that and of the ROI, from which chunks are numbered), so that a worker of another
job that still runs cannot make a chunk count as done. A listing says what there is to read;
a record that cannot be believed (torn, changed, of another chunk or job, of other boxes) does not
count.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import tensorstore as ts
from pydantic import ValidationError

from beam_inference.config.cohort import shared_state_url
from beam_inference.config.fields import Frozen, describe_fault
from beam_inference.config.job import JobConfig
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.foreign_text import clean_line
from beam_inference.job.chunk_records import CHUNKS_PER_FOLDER, ChunkEntries, folders
from beam_inference.job.crew_records import CrewRecords
from beam_inference.job.receipt_faults import first_receipt_fault, receipt_fault
from beam_inference.job.records import (
    DamagedRecord,
    Entry,
    LaunchNote,
    LaunchSummary,
    QuarantineRecord,
    Receipt,
    ReceiptTally,
    ShardCount,
)
from beam_inference.job.resolved_job import ResolvedJob
from beam_inference.job.seals import open_record, seal_record
from beam_inference.job.shards import Shard
from beam_inference.volumes.conditional_writes import create_key
from beam_inference.volumes.folders import delete_folder, list_keys
from beam_inference.volumes.kvstores import (
    LOCAL,
    MOST_PART_BYTES,
    MOST_SMALL_BYTES,
    PATIENCE_SECONDS,
    TRANSFER_SECONDS,
    LinkGuard,
    local_folder,
    open_kvstore,
    refuse_link,
    retry_request,
)

_ID = "id"
_SHARDS = "shards.json"
_FOLDERS = (
    "receipts/",
    "sums/",
    "former/",
    "seams/",
    "quarantine/",
    "quantized/",
    "shards/",
    "claims/",
    "workers/",
    "once/",
    "launches/",
)


class StopRequest:
    """Whether a launch was asked to stop, looked up at most once a second.

    It is called before every chunk, and a request to the store is not free: only the first call
    waits for its answer. Later looks are taken while chunks are computed.
    """

    def __init__(self, state: State, launch: str) -> None:
        self._state = state
        self._launch = launch
        self._is_stopped = False
        self._lock = threading.Lock()
        self._next_look: float | None = None

    def __call__(self) -> bool:
        """Whether the launch is to stop, as far as is known."""
        with self._lock:
            is_first = self._next_look is None
            is_due = is_first or (self._next_look or 0.0) <= time.monotonic()
            if is_due and not self._is_stopped:
                self._next_look = math.inf  # while one is under way
                if is_first:
                    self._look()
                else:
                    threading.Thread(target=self._look, daemon=True).start()
        return self._is_stopped

    def _look(self) -> None:
        self._is_stopped = self._state.has_stop_request(self._launch)
        self._next_look = time.monotonic() + 1


class State:
    """The state folder at a URL, as a TensorStore key-value store.

    Each method makes one or a few requests. A request that fails in a way that may pass is
    repeated, with backoff; then WorkerFault is raised. Receipts and quarantine belong to one job:
    they are reached through :meth:`of`.

    Args:
        url: URL of the folder.
        storage: settings of the object stores.
        job: the job whose records are read and written, if one is.
        store: the folder's key-value store, which is opened by default.
    """

    def __init__(
        self,
        url: str,
        storage: Storage = LOCAL,
        job: ResolvedJob | None = None,
        store: ts.KvStore | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._storage = storage
        self._store = open_kvstore(self.url, storage) if store is None else store
        shared = shared_state_url(self.url) or self.url
        self._guard = LinkGuard(shared, self.url.removeprefix(shared).lstrip("/"))
        self._job = job

    def of(self, job: ResolvedJob) -> State:
        """This folder with the receipts and the quarantine of one job."""
        return State(self.url, self._storage, job)

    def load_job(self) -> ResolvedJob | None:
        """The resolved job, or None before the first launch.

        Raises:
            StateError: job.json cannot be understood.
        """
        text = self._read("job.json")
        if text is None:
            return None
        try:
            return ResolvedJob.model_validate_json(open_record(text))
        except StateError as error:
            fault = str(error)
        except ValidationError as error:
            fault = f"{error.error_count()} faults, the first: {describe_fault(error)}"
        raise StateError(
            f"{self.url}/job.json cannot be understood ({fault}): it is damaged or from another "
            "version. Remove the state folder (with --overwrite) to start again."
        )

    def create_job(self, job: ResolvedJob) -> ResolvedJob:
        """Write job.json unless it is there.

        Returns:
            The job that is recorded in the end, which another launch may have written meanwhile.
        """
        text = seal_record(job.model_dump_json(indent=1))
        self._request(
            "write", "job.json", lambda: create_key(self._store, "job.json", self.url, text)
        )
        return self.load_job() or job

    def create_id(self) -> None:
        """Give this folder a random name, unless it has one: it is moved and copied with it."""
        text = uuid.uuid4().hex
        self._request("write", _ID, lambda: create_key(self._store, _ID, self.url, text))

    def read_id(self) -> str | None:
        """A hash of the folder's random name; None if it has none: older versions gave none."""
        text = self._read(_ID)
        return None if text is None else hashlib.sha256(text).hexdigest()[:32]

    def replace_job(self, job: ResolvedJob) -> None:
        """Replace job.json by that of the same job with another ROI."""
        self._write("job.json", seal_record(job.model_dump_json(indent=1)))

    def write_network(self, content: bytes) -> None:
        """Keep a network that the launch has made, under its hash."""
        key = network_key(hashlib.sha256(content).hexdigest())
        self._request(
            "write",
            key,
            lambda: self._store.write(key, content).result(timeout=TRANSFER_SECONDS),
        )

    def read_network(self, sha256: str) -> bytes:
        """Read a network that the first launch has made.

        Raises:
            WorkerFault: it is gone, or damaged.
        """
        key = network_key(sha256)
        result = self._request(
            "read",
            key,
            lambda: self._store.read(key).result(timeout=TRANSFER_SECONDS),
            MOST_PART_BYTES,
        )
        content = bytes(result.value)
        if result.state != "value" or hashlib.sha256(content).hexdigest() != sha256:
            raise WorkerFault(
                f"{self.url}/{key}, the network of precision int8 that the first launch made, is "
                f"{'gone' if result.state != 'value' else 'damaged'}: another would give other "
                "values. Restore it, or pass --overwrite to compute every chunk again."
            )
        return content

    def write_receipt(self, receipt: Receipt) -> None:
        """Write a receipt, durably; replaces one of the same chunk."""
        self._write_entry("receipts", receipt.chunk, receipt)

    def remove_damaged_receipt(self, damaged: DamagedRecord) -> None:
        """Remove a receipt that cannot be believed, unless its chunk was done again meanwhile."""
        self._entries("receipts").remove_unchanged(damaged.chunk, damaged.generation)

    def forget_chunks(self, chunks: Iterable[int]) -> None:
        """Remove the receipts of chunks, of both stages: all of these are to be done again."""
        for chunk in chunks:
            for folder in ("receipts", "sums"):
                self._entries(folder).remove(chunk)

    def set_receipts_aside(self, chunks: Iterable[int], launch: str) -> None:
        """Take their receipts from those of some chunks that have one: they are to be done again.

        The receipts are kept, see :meth:`read_former_receipts`.

        Args:
            chunks: the chunks.
            launch: the launch that does them again.
        """
        former = self._former(launch)
        for receipt in self.read_receipts(chunks):
            former.write(receipt.chunk, receipt.model_dump_json())
            self._entries("receipts").remove(receipt.chunk)

    def read_former_receipts(self, launch: str, chunks: Iterable[int]) -> list[Receipt]:
        """Read the receipts that some chunks had before a launch did them again, in order."""
        scanned = self._scan_entries(Receipt, self._former(launch), chunks, receipt_fault)
        return [each for each in scanned if isinstance(each, Receipt)]

    def list_redoing_launches(self) -> list[str]:
        """List the launches that have done chunks again, in the order of their identifiers."""
        return sorted({key.split("/")[1] for key in self._list_keys("former")})

    def _former(self, launch: str) -> ChunkEntries:
        key = self._own_job().records_key
        return ChunkEntries(self._store, self.url, self._storage, f"former/{launch}/{key[:16]}")

    def scan_receipts(self, chunks: Iterable[int]) -> Iterator[Receipt | DamagedRecord]:
        """Read the receipts of those of some chunks that have one, concurrently, in order."""
        return self._scan(Receipt, "receipts", chunks, receipt_fault)

    def read_receipts(self, chunks: Iterable[int]) -> list[Receipt]:
        """Read those receipts of some chunks that can be believed, concurrently, in order."""
        return [each for each in self.scan_receipts(chunks) if isinstance(each, Receipt)]

    def receipt_indices(self, start: int, stop: int) -> Iterator[int]:
        """List the chunks of ``start … stop`` that have a receipt, in order."""
        return self._entries("receipts").indices(start, stop)

    def count_receipts(self, start: int, stop: int) -> int:
        """Count the chunks of ``start … stop`` that have a receipt, by listing."""
        return self._entries("receipts").count(start, stop)

    def tally_receipts(self, stop: int, start: int = 0) -> ReceiptTally:
        """Read the receipts of ``start … stop``; count what those say that can be believed."""
        chunks = 0
        beyond_bound = 0
        for folder in folders(stop, start):
            for receipt in self.read_receipts(self.receipt_indices(*folder)):
                chunks += 1
                beyond_bound += receipt.patches_beyond_bound
        return ReceiptTally(chunks, beyond_bound)

    def hash_of_parts(self) -> str:
        """Hash of what all receipts say was written: the same for the same voxels."""
        digest = hashlib.sha256()
        for folder in folders(self._own_job().plan.chunks.count):
            for receipt in self.read_receipts(self.receipt_indices(*folder)):
                sums = [part.crc32 for some in receipt.parts_by_output.values() for part in some]
                digest.update(json.dumps([receipt.chunk, sorted(sums)]).encode())
        return digest.hexdigest()[:16]

    def write_sums(self, receipt: Receipt) -> None:
        """Record, durably, that a chunk's patches are computed and their sums are kept."""
        self._write_entry("sums", receipt.chunk, receipt)

    def scan_sums(self, chunks: Iterable[int]) -> Iterator[Receipt | DamagedRecord]:
        """Read the first-stage receipts of those of some chunks that have one, in order."""
        return self._scan(Receipt, "sums", chunks, first_receipt_fault)

    def read_sums(self, chunks: Iterable[int]) -> list[Receipt]:
        """Read those first-stage receipts of some chunks that can be believed, in order."""
        return [each for each in self.scan_sums(chunks) if isinstance(each, Receipt)]

    def sums_indices(self, start: int, stop: int) -> Iterator[int]:
        """List the chunks of ``start … stop`` whose patches are computed, in order."""
        return self._entries("sums").indices(start, stop)

    def count_sums(self, start: int, stop: int) -> int:
        """Count the chunks of ``start … stop`` whose patches are computed, by listing."""
        return self._entries("sums").count(start, stop)

    def quarantine_indices(self, start: int, stop: int) -> list[int]:
        """List the chunks of ``start … stop`` that have a quarantine record, in order, at once."""
        return self._entries("quarantine").few_indices(start, stop)

    def write_quarantine(self, record: QuarantineRecord) -> None:
        """Record a chunk that could not be done."""
        self._write_entry("quarantine", record.chunk, record)

    def scan_quarantine(self, chunks: Iterable[int]) -> Iterator[QuarantineRecord | DamagedRecord]:
        """Read the quarantine records of some chunks, also those that a receipt supersedes."""
        return self._scan(QuarantineRecord, "quarantine", chunks, _quarantine_fault)

    def read_quarantine(self, chunks: Iterable[int]) -> list[QuarantineRecord]:
        """Read those quarantine records of some chunks that can be believed."""
        scanned = self.scan_quarantine(chunks)
        return [each for each in scanned if isinstance(each, QuarantineRecord)]

    def read_quarantined(self, start: int, stop: int) -> Iterator[QuarantineRecord]:
        """Read the quarantine records of chunks ``start … stop`` that no receipt supersedes.

        A chunk whose record cannot be believed is as one that was never tried.
        """
        indices = self.quarantine_indices(start, stop)
        for first in range(0, len(indices), CHUNKS_PER_FOLDER):
            some = indices[first : first + CHUNKS_PER_FOLDER]
            done = {receipt.chunk for receipt in self.read_receipts(some)}
            yield from self.read_quarantine([i for i in some if i not in done])

    def write_quarantine_file(self, records: list[QuarantineRecord]) -> None:
        """Write ``quarantine.jsonl``, one record a line, or remove it if there are none."""
        lines = "".join(record.model_dump_json() + "\n" for record in records)
        self._write("quarantine.jsonl", lines or None)

    def read_shard_count(self) -> int | None:
        """Read how many shards the job is divided into; None if it is not.

        Raises:
            StateError: the record is damaged.
        """
        text = self._read(_SHARDS)
        if text is None:
            return None
        try:
            return ShardCount.model_validate_json(open_record(text)).shards
        except (StateError, ValidationError):
            raise StateError(
                f"{self.url}/{_SHARDS} is damaged, so nobody knows how many shards the job is "
                "divided into. Say it again: beam-inference prepare … --shards N --resplit"
            ) from None

    def write_shard_count(self, count: int, *, replace: bool) -> None:
        """Record how many shards the job is divided into, unless it is recorded.

        Args:
            count: number of shards.
            replace: replace what is recorded.
        """
        text = seal_record(ShardCount(shards=count).model_dump_json())
        if replace:
            self._write(_SHARDS, text)
            return
        self._request("write", _SHARDS, lambda: create_key(self._store, _SHARDS, self.url, text))

    def write_shard_end(self, shard: Shard, launch: str) -> None:
        """Note that a shard has come to its end, so that ``finish`` need not wait for it.

        This is an economy: only receipts prove that chunks are done.
        """
        end = {"launch": launch, "finished_at": datetime.now(UTC).isoformat()}
        self._shard_ends(shard.count).write(shard.index, json.dumps(end))

    def ended_shards(self, count: int) -> set[int]:
        """List those of ``count`` shards that have come to their end."""
        return set(self._shard_ends(count).indices(0, count))

    def _shard_ends(self, count: int) -> ChunkEntries:
        folder = f"shards/{self._own_job().records_key[:16]}/{count}"
        return ChunkEntries(self._store, self.url, self._storage, folder)

    def crew(self) -> CrewRecords:
        """Return the claims and the signs of life of those who work on the job."""
        return CrewRecords(self._store, self.url, self._storage, self._own_job().records_key)

    def note_start(self, launch: str) -> None:
        """Record that a launch begins, which also shows that the folder can be written."""
        self._write(
            f"launches/{launch}.started", f"{datetime.now(UTC).isoformat()} {platform.node()}\n"
        )

    def write_chunks(self, launch: str, chunks: Sequence[int]) -> None:
        """Record the chunks that a launch does, where it does not do all, at :meth:`chunks_url`."""
        self._write(f"launches/{launch}.chunks", "".join(f"{chunk}\n" for chunk in chunks))

    def chunks_url(self, launch: str) -> str:
        """URL of the list that :meth:`write_chunks` writes."""
        return f"{self.url}/launches/{launch}.chunks"

    def write_launch(self, launch: str, text: str) -> None:
        """Record what workers need to know of a launch, where it has several volumes."""
        self._write(f"launches/{launch}.launch", text)

    def read_launch(self, launch: str) -> bytes:
        """Read what workers need to know of a launch.

        Raises:
            WorkerFault: it is gone.
        """
        text = self._read(f"launches/{launch}.launch")
        if text is None:
            raise WorkerFault(f"{self.url}/launches/{launch}.launch is gone: run the job again")
        return text

    def write_answer(self, launch: str, text: str) -> None:
        """Record what a worker has found out for a launch, unless another one has.

        Args:
            launch: the launch.
            text: a JSON object with at least one member.
        """
        key = _answer_key(launch)
        sealed = seal_record(text)
        self._request("write", key, lambda: create_key(self._store, key, self.url, sealed))

    def read_answer(self, launch: str) -> bytes | None:
        """Read what a worker has found out for a launch; None if none has.

        Raises:
            StateError: the record is damaged.
        """
        text = self._read(_answer_key(launch))
        if text is None:
            return None
        try:
            return open_record(text)
        except StateError as error:
            raise StateError(f"{self.url}/{_answer_key(launch)}: {error}") from None

    def forget_question(self, launch: str) -> None:
        """Remove what a worker has found out for a launch, and the request to stop it."""
        for key in (_answer_key(launch), f"launches/{launch}.stop"):
            self._write(key, None)

    def write_fault(self, cause: str | None) -> None:
        """Record why a volume could not be opened; None where it was opened since."""
        self._write("fault.json", None if cause is None else json.dumps({"cause": cause}))

    def read_fault(self) -> str | None:
        """Read why a volume could not be opened at the last launch; None if it was."""
        text = self._read("fault.json")
        if text is None:
            return None
        with suppress(ValueError, KeyError, TypeError):
            return clean_line(str(parse_json(text)["cause"]))
        return "its fault.json is damaged"

    def request_stop(self, launch: str) -> None:
        """Ask the workers of a launch, wherever they are, to start no further chunk."""
        self._write(f"launches/{launch}.stop", "")

    def has_stop_request(self, launch: str) -> bool:
        """Whether a launch was asked to stop; no, where the folder cannot be read."""
        try:
            return self._read(f"launches/{launch}.stop") is not None
        except WorkerFault:
            return False

    def write_summary(self, launch: str, summary: LaunchSummary) -> None:
        """Record how a launch ended."""
        self._write(f"launches/{launch}.json", summary.model_dump_json())

    def read_summary(self, launch: str) -> LaunchSummary | None:
        """Read how a launch ended; None if it did not, or was killed while it wrote this."""
        text = self._read(f"launches/{launch}.json")
        try:
            return None if text is None else LaunchSummary.model_validate_json(text)
        except ValidationError:
            return None

    def read_launches(self) -> list[LaunchNote]:
        """Read the notes of all launches, the earliest first."""
        names = self._list_keys("launches")
        notes = []
        for name in names:
            launch, _, kind = name.removeprefix("launches/").partition(".")
            if kind == "started":
                note = (self._read(name) or b"").decode(errors="replace")
                started, _, node = note.strip().partition(" ")
                stopped = f"launches/{launch}.stop" in names
                summary = self.read_summary(launch)
                # A launch that was killed while it wrote this left a torn date.
                with suppress(ValueError):
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
        """Delete everything that this class writes, of all jobs; job.json comes last."""
        for folder in _FOLDERS:
            delete_folder(self.url, self._storage, folder)
        for key in ("quarantine.jsonl", "fault.json", _SHARDS, _ID, "job.json"):
            self._write(key, None)

    def _list_keys(self, folder: str) -> set[str]:
        keys = ts.KvStore.KeyRange(f"{folder}/", f"{folder}0")  # "0" comes after "/"
        listed = self._request("list", folder, partial(list_keys, self._store, self._storage, keys))
        return {key.decode() for key in listed}

    def _entries(self, folder: str) -> ChunkEntries:
        key = self._own_job().records_key
        return ChunkEntries(self._store, self.url, self._storage, f"{folder}/{key[:16]}")

    def _own_job(self) -> ResolvedJob:
        if self._job is None:
            raise ValueError("receipts are of one job: use state.of(job)")
        return self._job

    def _read(self, key: str) -> bytes | None:
        result = self._request(
            "read", key, lambda: self._store.read(key).result(timeout=PATIENCE_SECONDS)
        )
        return bytes(result.value) if result.state == "value" else None

    def _write(self, key: str, text: str | None) -> None:
        self._request(
            "write",
            key,
            lambda: self._store.write(key, text).result(timeout=PATIENCE_SECONDS),
        )

    def _request(
        self,
        what: str,
        key: str,
        action: Callable[[], Any],
        most_bytes: int = MOST_SMALL_BYTES,
    ) -> Any:
        if what == "write":
            self._guard.check(key)
        return retry_request(what, f"{self.url}/{key}", action, most_bytes)

    def _write_entry(self, folder: str, chunk: int, entry: Frozen) -> None:
        self._entries(folder).write(chunk, entry.model_dump_json())

    def _scan(
        self,
        kind: type[Entry],
        folder: str,
        chunks: Iterable[int],
        fault_of: Callable[[Entry, int, ResolvedJob], str | None],
    ) -> Iterator[Entry | DamagedRecord]:
        return self._scan_entries(kind, self._entries(folder), chunks, fault_of)

    def _scan_entries(
        self,
        kind: type[Entry],
        entries: ChunkEntries,
        chunks: Iterable[int],
        fault_of: Callable[[Entry, int, ResolvedJob], str | None],
    ) -> Iterator[Entry | DamagedRecord]:
        job = self._own_job()
        for stored in entries.read(chunks):
            entry = None
            cause = stored.fault
            if cause is None:
                try:
                    entry = kind.model_validate_json(stored.text)
                except ValidationError as error:
                    cause = describe_fault(error)
            if entry is None:
                yield DamagedRecord(
                    stored.chunk,
                    f"{stored.url} cannot be believed ({cause}): it is damaged or from another "
                    "version. The next run does its chunk again.",
                    stored.generation,
                )
                continue
            fault = fault_of(entry, stored.chunk, job)
            if fault is None:
                yield entry
            else:
                box = job.plan.chunks.core_box(stored.chunk)
                yield DamagedRecord(
                    stored.chunk,
                    f"chunk {stored.chunk} {box}: {fault} ({stored.url})",
                    stored.generation,
                )


def _answer_key(launch: str) -> str:
    return f"launches/{launch}.answer"


def network_key(sha256: str) -> str:
    """Key of a network of integers in the state folder, by its hash."""
    return f"quantized/{sha256}"


def _quarantine_fault(record: QuarantineRecord, chunk: int, job: ResolvedJob) -> str | None:
    if (record.chunk, record.fingerprint) == (chunk, job.fingerprint):
        return None
    return f"its quarantine record is that of chunk {record.chunk}, or of another job"


STATE_FOLDER = "_beam_inference"
"""Default name of the state folder inside the output."""


def default_state_url(config: JobConfig) -> str:
    """URL of a job's state folder: ``job.state_path``, or the default folder in its output.

    Raises:
        StateError: what lies in it is a link, or the default folder itself.
    """
    stated = config.job.state_path
    if stated is None:
        return state_folder_of(config.output.path)
    if shared_state_url(stated) is not None:  # the user has named the folder above two of ours
        try:
            refuse_link(stated)
        except WorkerFault as error:
            raise StateError(str(error)) from None
    folder = local_folder(stated)  # itself a link by the user's own will, if it is one
    _refuse_links(None if folder is None else folder.resolve())
    return stated


def state_folder_of(output_url: str) -> str:
    """URL of the default state folder of a volume.

    Raises:
        StateError: it, or what lies in it, is a link, by which a stranger's volume could have other
            folders changed.
    """
    url = f"{output_url.rstrip('/')}/{STATE_FOLDER}"
    _refuse_links(local_folder(url))
    return url


def _refuse_links(folder: Path | None) -> None:
    link = None if folder is None else _find_link(folder, _LEVELS_OF_FOLDERS)
    if link is not None:
        raise StateError(
            f"{link} is a link, and what it leads to would be changed: remove it, or name another "
            "place as job.state_path"
        )


_LEVELS_OF_FOLDERS = 2
"""Levels of a state folder that are looked through at once, down to receipts/FINGERPRINT.

Folders below these are looked at when something in them is to be changed.
"""


def _find_link(path: Path, levels: int) -> Path | None:
    """The first link among a path and what lies in it, some levels deep."""
    if path.is_symlink():
        return path
    if levels and path.is_dir():
        with os.scandir(path) as entries:
            for entry in entries:
                link = _find_link(Path(entry.path), levels - 1)
                if link is not None:
                    return link
    return None
