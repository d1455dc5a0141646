"""Work on a volume in stages, chunk by chunk: its description, and the records of what is done.

Conversion, pyramids and segmentation are made of such stages. Inference is not: its chunks own
patches, and have receipts that prove what was written. Each chunk of a stage reads what earlier
stages have completed, and writes whole blocks. Small records in the state folder of the target
name the chunks that are done, so a job that was killed continues where it stopped::

    KIND/job.json                      description of the job, and its fingerprint
    KIND/stages.json                   number of chunks of each stage, and that fingerprint
    KIND/FINGERPRINT/STAGE/done/000000000/000000000012.json
                                       chunk 12 is durably done
    KIND/FINGERPRINT/STAGE/failed/000000000/000000000013.json
                                       why chunk 13 failed; void once there is a done record
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from beam_inference.config.fields import Json
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.geometry.partition import in_runs
from beam_inference.job.chunk_records import (
    ChunkEntries,
    StoredRecord,
    check_count,
    folders,
    list_absent,
)
from beam_inference.job.state import State
from beam_inference.volumes.kvstores import open_kvstore

logger = logging.getLogger(__name__)

DoChunk = Callable[[int], None]

KINDS_OF_VOLUMES = ("components", "convert", "segment")
"""Kinds of jobs in stages that write the voxels of the volume in whose state folder they are."""


def record_of(kind: str) -> str:
    """Key of the description of a job of a kind, in the state folder."""
    return f"{kind}/job.json"


def folder_of(kind: str, fingerprint: str) -> str:
    """Place of the records of a job of a kind, in the state folder."""
    return f"{kind}/{fingerprint[:16]}"


def stages_record_of(kind: str) -> str:
    """Key of the numbers of chunks of a job's stages, in the state folder."""
    return f"{kind}/stages.json"


class ChunkStage(Protocol):
    """One stage: a small picklable value."""

    @property
    def name(self) -> str:
        """Word for logs and for the folder of the stage's records, unique in its job."""

    @property
    def count(self) -> int:
        """Number of its chunks."""

    def make_worker(self) -> DoChunk:
        """Open what a process needs, and return the function that does one chunk.

        The function is called from several threads, and returns when the chunk is durable. A chunk
        that is done twice, or by two processes at once, must write the same bytes. An exception is
        recorded as the chunk's failure; only after a :class:`~beam_inference.errors.WorkerFault`
        the process cannot go on.
        """


@dataclass(frozen=True)
class StageJob:
    """Stages, each begun once the one before it is complete.

    Attributes:
        kind: "convert", "pyramid", …: what is made of the target.
        description: everything that determines the bytes that are written, as JSON values.
        state_url: the state folder of the target.
        storage: settings to reach it.
        stages: the stages in their order.
        launch: name of this launch.

    Raises:
        ConfigError: a stage has more chunks than anybody could compute.
    """

    kind: str
    description: Json
    state_url: str
    storage: Storage
    stages: tuple[ChunkStage, ...]
    launch: str

    def __post_init__(self) -> None:
        for stage in self.stages:
            check_count(stage.count, f"{self.kind}: {stage.name}")

    @property
    def fingerprint(self) -> str:
        """Hash of the description: 64 hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.description, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Place of this job's records in the state folder."""
        return folder_of(self.kind, self.fingerprint)

    @property
    def record(self) -> str:
        """Key of the job's description in the state folder."""
        return record_of(self.kind)

    def state(self) -> State:
        """Return the state folder, in which only its launches matter here."""
        return State(self.state_url, self.storage)

    def done_entries(self, stage: ChunkStage) -> ChunkEntries:
        """Return the records of the chunks of a stage that are done."""
        return self._entries(stage, "done")

    def failed_entries(self, stage: ChunkStage) -> ChunkEntries:
        """Return the records of the chunks of a stage that failed."""
        return self._entries(stage, "failed")

    def _entries(self, stage: ChunkStage, outcome: str) -> ChunkEntries:
        store = open_kvstore(self.state_url, self.storage)
        return ChunkEntries(
            store, self.state_url, self.storage, f"{self.folder}/{stage.name}/{outcome}"
        )

    def done_chunks(self, stage: ChunkStage, chunks: Iterable[int]) -> set[int]:
        """Return those of some chunks whose done record can be believed; others are removed."""
        entries = self.done_entries(stage)
        done = set()
        for stored in entries.read(chunks):
            if self._parse_record(stage, stored) is None:
                logger.warning(
                    "%s is damaged, or of something else, and does not count: its chunk is done "
                    "again",
                    stored.url,
                )
                entries.remove(stored.chunk)
            else:
                done.add(stored.chunk)
        return done

    def count_believed(self, stage: ChunkStage) -> int:
        """Count the chunks of a stage whose done record can be believed; none is removed."""
        return sum(
            self._parse_record(stage, stored) is not None
            for folder in folders(stage.count)
            for stored in self.done_entries(stage).read(self._listed_chunks(stage, *folder))
        )

    def count_done(self) -> int:
        """Count the chunks of all stages that are done, by reading their records."""
        return sum(
            len(self.done_chunks(stage, self._listed_chunks(stage, *folder)))
            for stage in self.stages
            for folder in folders(stage.count)
        )

    def _listed_chunks(self, stage: ChunkStage, start: int, stop: int) -> list[int]:
        return list(self.done_entries(stage).indices(start, stop))

    def failures(self, stage: ChunkStage, most: int) -> list[str]:
        """Return why chunks of a stage could not be done, the first few."""
        failed = self.failed_entries(stage)
        some = failed.few_indices(0, stage.count)[: 10 * most]
        done = self.done_chunks(stage, some)
        stored = failed.read([index for index in some if index not in done])
        records = (self._parse_record(stage, each) for each in stored)
        return [
            f"{stage.name}, chunk {record['chunk']}: {record.get('cause', 'unknown')}"
            for record in records
            if record is not None
        ][:most]

    def missing_runs(
        self, stage: ChunkStage, index_range: tuple[int, int], length: int
    ) -> Iterator[tuple[int, ...]]:
        """Yield runs of the chunks of a range that are not done, in bounded memory."""

        def list_done(start: int, stop: int) -> set[int]:
            return self.done_chunks(stage, self._listed_chunks(stage, start, stop))

        yield from in_runs(list_absent(*index_range, list_done), length)

    def names_of(self, stage: ChunkStage) -> Json:
        """What records of a stage's chunks say of it: a record of something else does not count."""
        return {"job": self.fingerprint[:16], "stage": stage.name}

    def _parse_record(self, stage: ChunkStage, stored: StoredRecord) -> Json | None:
        """Parse a record of a chunk; None if it cannot be believed."""
        if stored.fault is not None:
            return None
        try:
            record = parse_json(stored.text)
        except ValueError:
            return None
        if not isinstance(record, dict):
            return None
        expected = {**self.names_of(stage), "chunk": stored.chunk}
        return record if all(record.get(key) == value for key, value in expected.items()) else None
