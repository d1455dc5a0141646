"""The state folder of a job: the resolved job, receipts, quarantine, and each launch's notes.

::

    job.json                                  the resolved job, written once, at first launch
    receipts/FINGERPRINT/000000000/000000000012.json      chunk 12 is durably written; folders of 4096
    quarantine/FINGERPRINT/000000000/000000000013.json    chunk 13 could not be done; a receipt supersedes it
    quarantine.jsonl                          what is quarantined at the end of a launch, to give to --chunks
    launches/<id>.started                     when and where this launch began
    launches/<id>.stop                        asks this launch's workers to start no further chunk
    launches/<id>.json                        how this launch ended

Receipts lie under the fingerprint of their job, so that a listing is proof: a worker of another job that still runs,
or a state folder put together by hand, cannot make a chunk count as done.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, TypeVar

import tenacity
import tensorstore as ts
from pydantic import BaseModel, ConfigDict, ValidationError

from beam_inference.bounding_box import BoundingBox, Zyx
from beam_inference.config import JobConfig, Storage, factory_parts
from beam_inference.errors import StateError, WorkerFault
from beam_inference.plan import InferencePlan, make_plan
from beam_inference.stores import LOCAL, is_transient, one_line, open_kvstore

CHUNKS_PER_FOLDER = 4096

Entry = TypeVar("Entry", bound="_Frozen")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Box(_Frozen):
    """A bounding box as it stands in JSON, ZYX."""

    start: Zyx
    stop: Zyx

    @classmethod
    def of(cls, box: BoundingBox) -> Box:
        """The JSON form of a box."""
        return cls(start=box.start, stop=box.stop)

    def box(self) -> BoundingBox:
        """The box."""
        return BoundingBox(self.start, self.stop)


class ResolvedJob(_Frozen):
    """A job with every default and ``auto`` made definite: what workers and later launches go by.

    Attributes:
        config: the job, paths absolute, device definite.
        input_bounds, input_channels, input_dtype: of the volume read.
        roi: the box to produce.
        output_bounds: extent of the output.
        voxel_size_nm: of the output, ZYX.
        model_sha256: see :func:`beam_inference.predictors.model_files.model_sha256`.
        engine: what of the engine determines bits, see :meth:`beam_inference.predictors.Predictor.describe`.
        working_set_bytes: what the network allocates for a batch, measured; not part of the fingerprint.
        versions: of the libraries at first launch; not part of the fingerprint, only warned about.
    """

    config: JobConfig
    input_bounds: Box
    input_channels: int
    input_dtype: str
    roi: Box
    output_bounds: Box
    voxel_size_nm: tuple[float, float, float]
    model_sha256: str
    engine: dict[str, str]
    working_set_bytes: int
    versions: dict[str, str]

    @cached_property
    def plan(self) -> InferencePlan:
        """The job's geometry."""
        inference, roi = self.config.inference, self.config.roi
        margin = (0, 0, 0) if inference.seams != "crop" else inference.chunk_crop_margin or inference.patch_overlap
        return make_plan(
            volume=self.input_bounds.box(),
            roi=self.roi.box(),
            context=roi.context if roi else (0, 0, 0),
            patch_shape=inference.patch_shape,
            patch_overlap=inference.patch_overlap,
            chunk_shape=inference.chunk_shape,
            crop_margin=self.config.model.crop_margin,
            seams=inference.seams,
            chunk_crop_margin=margin,
        )

    @cached_property
    def identity(self) -> dict[str, dict[str, Any]]:
        """All that determines the output's bytes, in sections of JSON values."""
        config, plan = self.config, self.plan
        return {
            "input": {
                **config.input.model_dump(mode="json"),
                "bounds": self.input_bounds.model_dump(mode="json"),
                "dtype": self.input_dtype,
            },
            "model": {
                **config.model.model_dump(mode="json", exclude={"path", "weights", "sha256", "voxel_size_nm"}),
                "sha256": self.model_sha256,
                "factory": _factory_name(config.model.path),
            },
            "engine": {**self.engine, "batch_size": config.inference.batch_size},
            "geometry": {
                "roi": self.roi.model_dump(mode="json"),
                "domain": Box.of(plan.lattice.domain).model_dump(mode="json"),
                "patch_shape": list(plan.lattice.patch_shape),
                "patch_overlap": list(plan.lattice.patch_overlap),
                "chunk_shape": list(plan.chunks.chunk_shape),
                "seams": plan.seams,
                "chunk_crop_margin": list(plan.chunk_crop_margin),
            },
            "output": config.output.model_dump(mode="json", include={"format", "dtype", "block_shape", "value_range"}),
        }

    @cached_property
    def fingerprint(self) -> str:
        """Hash of :attr:`identity`: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()

    def differences(self, other: ResolvedJob) -> list[str]:
        """What differs between the identities of this job and another, one line per key."""
        lines = []
        for section, values in self.identity.items():
            theirs = other.identity[section]
            lines += [
                f"{section}.{key}: {values.get(key)} here, {theirs.get(key)} there"
                for key in sorted({*values, *theirs})
                if values.get(key) != theirs.get(key)
            ]
        return lines


def _factory_name(path: str) -> str | None:
    """Which function makes the network, without the folder that its file lies in."""
    factory = factory_parts(path)
    return f"{PurePath(factory[0]).name}:{factory[1]}" if factory else None


class ChannelStatistics(_Frozen):
    """Of one channel of a chunk as written."""

    min: float
    max: float
    mean: float
    zeros: int
    nans: int


class Receipt(_Frozen):
    """Proof that a chunk is durably written.

    Attributes:
        chunk: its index.
        box: its core box.
        crc32: of what was written, its bytes in C order (channel, z, y, x), little-endian.
        channels: statistics of each.
        batch_size: patches per network call; below the job's if the device ran out of memory.
        seconds: per stage.
        attempts: per stage.
        launch: which launch did it.
        fingerprint: of the job.
    """

    chunk: int
    box: Box
    crc32: int
    channels: list[ChannelStatistics]
    batch_size: int
    seconds: dict[str, float]
    attempts: dict[str, int]
    launch: str
    fingerprint: str


class QuarantineRecord(_Frozen):
    """Why a chunk could not be done.

    Attributes:
        chunk: its index.
        box: its core box. input_box: what it reads.
        stage: "read" or "infer".
        cause: the error.
        attempts: how often it was tried.
        fingerprint: of the job.
    """

    chunk: int
    box: Box
    input_box: Box
    stage: str
    cause: str
    attempts: int
    launch: str
    fingerprint: str


class LaunchSummary(_Frozen):
    """How a launch ended: chunks done, found done by workers, and quarantined by it."""

    done: int
    skipped: int
    quarantined: int


class State:
    """The state folder at a URL, through a TensorStore key-value store; every method is one or a few requests.

    What is of one job (receipts, quarantine) is reached through :meth:`of`. Requests that fail in a way that may pass
    are tried again, with backoff.
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
                f"{self.url}/job.json cannot be understood ({error.error_count()} faults, the first: "
                f"{error.errors()[0]['msg']}): it is damaged or from another version. Remove the state folder (with "
                "--overwrite) to start anew."
            ) from None

    def create_job(self, job: ResolvedJob) -> ResolvedJob:
        """Write job.json if absent; the one that is there in the end, which a racing launch may have written."""
        there = self._request("read", "job.json", lambda: self._store.read("job.json").result())
        if there.state != "value":
            self._write("job.json", job.model_dump_json(indent=1), if_equal=there.stamp.generation)
        return self.load_job() or job

    def write_receipt(self, receipt: Receipt) -> None:
        """Write a receipt, durably; replaces one of the same chunk."""
        self._write(self._key("receipts", receipt.chunk), receipt.model_dump_json())

    def read_receipt(self, chunk: int) -> Receipt | None:
        """The receipt of a chunk, or None."""
        return self._entry(Receipt, self._key("receipts", chunk))

    def receipts(self, start: int, stop: int) -> Iterator[Receipt]:
        """All receipts of chunks ``start … stop``, in order; read concurrently, a folder at a time."""
        yield from self._entries(Receipt, "receipts", start, stop)

    def receipt_indices(self, start: int, stop: int) -> list[int]:
        """Which of the chunks ``start … stop`` have a receipt, in order. Lists; reads nothing."""
        return self._indices("receipts", start, stop)

    def write_quarantine(self, record: QuarantineRecord) -> None:
        """Record a chunk that could not be done."""
        self._write(self._key("quarantine", record.chunk), record.model_dump_json())

    def quarantined(self, start: int, stop: int) -> Iterator[QuarantineRecord]:
        """Quarantine records of chunks ``start … stop`` that no receipt supersedes, in order."""
        for record in self._entries(QuarantineRecord, "quarantine", start, stop):
            if self._read(self._key("receipts", record.chunk)) is None:
                yield record

    def write_quarantine_file(self, records: list[QuarantineRecord]) -> None:
        """Write ``quarantine.jsonl``, one record a line; removes it if there are none."""
        lines = "".join(record.model_dump_json() + "\n" for record in records)
        self._write("quarantine.jsonl", lines or None)

    def note_start(self, launch: str) -> None:
        """Record that a launch begins; also shows whether the folder can be written."""
        self._write(f"launches/{launch}.started", f"{datetime.now(UTC).isoformat()} {platform.node()}\n")

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

    def clear(self) -> None:
        """Delete what this class has written, of all jobs, and nothing else; job.json last."""
        for folder in ("receipts/", "quarantine/", "launches/"):
            keys = ts.KvStore.KeyRange(inclusive_min=folder, exclusive_max=folder[:-1] + "0")  # "0" comes after "/"
            self._request("delete", folder, partial(self._delete, keys))
        for key in ("quarantine.jsonl", "job.json"):
            self._write(key, None)

    def _delete(self, keys: ts.KvStore.KeyRange) -> None:
        self._store.delete_range(keys).result()

    def _key(self, folder: str, chunk: int) -> str:
        """Keys sort as their chunks do, so a range of chunks is one range of keys."""
        if self._fingerprint is None:
            raise ValueError("receipts are of one job: use state.of(job)")
        return f"{folder}/{self._fingerprint[:16]}/{chunk // CHUNKS_PER_FOLDER:09d}/{chunk:012d}.json"

    def _read(self, key: str) -> bytes | None:
        result = self._request("read", key, lambda: self._store.read(key).result())
        return bytes(result.value) if result.state == "value" else None

    def _write(self, key: str, text: str | None, if_equal: bytes | None = None) -> None:
        self._request("write", key, lambda: self._store.write(key, text, if_equal=if_equal).result())

    def _request(self, what: str, key: str, action: Callable[[], Any]) -> Any:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(5),
            wait=tenacity.wait_exponential_jitter(initial=0.1, max=5, jitter=0.2),
            retry=tenacity.retry_if_exception(is_transient),
            reraise=True,
        )
        try:
            return retrying(action)
        except (ValueError, OSError) as error:
            raise WorkerFault(f"cannot {what} {self.url}/{key}: {one_line(error)}") from error

    def _entry(self, kind: type[Entry], key: str) -> Entry | None:
        text = self._read(key)
        return None if text is None else self._parse(kind, key, text)

    def _parse(self, kind: type[Entry], key: str, text: bytes) -> Entry:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise StateError(
                f"{self.url}/{key} cannot be understood ({error.errors()[0]['msg']}): it is damaged or from another "
                "version. Delete this one file; its chunk is then done again."
            ) from None

    def _entries(self, kind: type[Entry], folder: str, start: int, stop: int) -> Iterator[Entry]:
        for first in range(start, stop, CHUNKS_PER_FOLDER):
            indices = self._indices(folder, first, min(stop, first + CHUNKS_PER_FOLDER))
            keys = [self._key(folder, index) for index in indices]
            for key, reading in [(key, self._store.read(key)) for key in keys]:  # all at once, taken in order
                result = self._request("read", key, _again_if_failed(reading, self._store, key))
                if result.state == "value":
                    yield self._parse(kind, key, bytes(result.value))

    def _indices(self, folder: str, start: int, stop: int) -> list[int]:
        keys = ts.KvStore.KeyRange(inclusive_min=self._key(folder, start), exclusive_max=self._key(folder, stop))
        names = self._request("list", folder, lambda: self._store.list(keys).result())
        # A killed writer leaves lock files beside the keys of a local store.
        return sorted(int(name[-17:-5]) for name in names if name.endswith(b".json"))


def _again_if_failed(reading: Any, store: Any, key: str) -> Callable[[], Any]:
    """The result of a read under way; once that has failed, of a new one."""
    under_way = [reading]

    def result() -> Any:
        return (under_way.pop() if under_way else store.read(key)).result()

    return result
