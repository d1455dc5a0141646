"""The records of a job in stages, in the state folder of its target."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from beam_inference.config.fields import Json
from beam_inference.config.formats import OutputSpec, get_format
from beam_inference.config.json_text import parse_json
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.job.stage_job import KINDS_OF_VOLUMES, ChunkStage, StageJob, stages_record_of
from beam_inference.job.state import state_folder_of
from beam_inference.volumes.conditional_writes import create_key
from beam_inference.volumes.folders import delete_folder
from beam_inference.volumes.kvstores import (
    PATIENCE_SECONDS,
    open_kvstore,
    retry_request,
)

_NAMED_FAILURES = 10


def stage_job(
    kind: str,
    description: Json,
    target: str,
    storage: Storage,
    stages: Sequence[ChunkStage],
) -> StageJob:
    """A job whose records are in the state folder of the volume at ``target``, a URL."""
    state_url = state_folder_of(target)
    return StageJob(kind, description, state_url, storage, tuple(stages), uuid.uuid4().hex[:12])


def begun_names(job: StageJob, output: OutputSpec) -> list[str]:
    """What a job of this kind has made of an output, if it was killed before that was a volume.

    Returns:
        Names of files, and of folders with a "/" behind; none where no such job has begun.
    """
    if StageRecords(job).earlier_job() is None:
        return []
    format = get_format(output.format)
    folder = [f"{format.array_path.partition('/')[0]}/"] if format.array_path else []
    files = [*format.array_files(output), *format.group_files(output)]
    return folder + [name for name in files if "/" not in name]


class StageRecords:
    """The records of a job, in the state folder of its target."""

    def __init__(self, job: StageJob) -> None:
        self._job = job

    def begin(self, *, overwrite: bool = False) -> None:
        """Record what will be made of the target, before anything is made.

        Args:
            overwrite: first forget what was done, by this or any other job of the kind.

        Raises:
            StateError: another job of this kind has begun to write there, the record of what was
                begun is damaged, or the folder cannot be written.
        """
        job = self._job
        try:
            record = self._create(overwrite=overwrite)
        except WorkerFault as error:
            raise _unusable(error) from None
        self._refuse_damaged(record)
        if record.get("fingerprint") != job.fingerprint:
            # as text, as the fingerprint has them: 130 and 130.0 are not the same
            differing = ", ".join(
                key
                for key, value in job.description.items()
                if json.dumps(record.get(key), sort_keys=True) != json.dumps(value, sort_keys=True)
            )
            raise StateError(
                f"{job.state_url}/{job.kind} holds records of another job (what differs: "
                f"{differing}): what it has made there would be mixed with this. Use another "
                "target, or pass --overwrite to make everything again."
            )
        if job.kind in KINDS_OF_VOLUMES:  # whoever reads the volume is told how far it is
            self._write_stages()

    def earlier_job(self) -> StageJob | None:
        """Return the job of this kind that was begun here: this one, or one of other description.

        Raises:
            StateError: the state folder cannot be read.
        """
        record = self._read_or_refuse()
        if record is None:
            return None
        description = {key: value for key, value in record.items() if key != "fingerprint"}
        return replace(self._job, description=description)

    def has_begun(self) -> bool:
        """Return whether this very job was begun before.

        Raises:
            StateError: the state folder cannot be read, or its record is damaged.
        """
        record = self._read_or_refuse()
        if record is None:
            return False
        self._refuse_damaged(record)
        return bool(record.get("fingerprint") == self._job.fingerprint)

    def chunk_counter(self) -> Callable[[], int]:
        """Return a function that counts the chunks done by now; it counts complete stages once."""
        complete: set[str] = set()

        def count_done() -> int:
            total = 0
            for stage in self._job.stages:
                if stage.name in complete:
                    total += stage.count
                    continue
                done = self._job.done_entries(stage).count(0, stage.count)
                total += done
                if done < stage.count:
                    break  # nothing of later stages is done
                complete.add(stage.name)
            return total

        return count_done

    def count_done(self) -> int:
        """Count the chunks done: by names as long as some are missing, then by reading all.

        Nothing is called complete that cannot be believed.
        """
        job = self._job
        listed = self.chunk_counter()()
        if listed < sum(stage.count for stage in job.stages):
            return listed
        return sum(map(job.count_believed, job.stages))

    def failures(self) -> list[str]:
        """Return why chunks could not be done, the first few of each stage."""
        return [
            line
            for stage in self._job.stages
            for line in self._job.failures(stage, _NAMED_FAILURES)
        ]

    def _create(self, *, overwrite: bool) -> Json:
        """Write the job's description unless there is one; returns the one that is there then."""
        job = self._job
        store = open_kvstore(job.state_url, job.storage)
        if overwrite:
            delete_folder(job.state_url, job.storage, f"{job.kind}/")
        text = json.dumps(
            {"fingerprint": job.fingerprint, **job.description}, indent=1, sort_keys=True
        )
        retry_request(
            "write",
            f"{job.state_url}/{job.record}",
            lambda: create_key(store, job.record, job.state_url, text),
        )
        # Another launch may have been faster.
        record = _parse(self._read(store))
        if record is None:
            raise WorkerFault(f"{job.state_url}/{job.record} was removed as soon as it was written")
        return record

    def _write_stages(self) -> None:
        """Record how many chunks there are to do, for those who read the volume before they are."""
        job = self._job
        store = open_kvstore(job.state_url, job.storage)
        key = stages_record_of(job.kind)
        stages = {stage.name: stage.count for stage in job.stages}
        text = json.dumps({"fingerprint": job.fingerprint, "stages": stages}, sort_keys=True)
        try:
            retry_request(
                "write",
                f"{job.state_url}/{key}",
                lambda: store.write(key, text.encode()).result(timeout=PATIENCE_SECONDS),
            )
        except WorkerFault as error:
            raise _unusable(error) from None

    def _refuse_damaged(self, record: Json) -> None:
        job = self._job
        if not record:
            raise StateError(
                f"{job.state_url}/{job.record} is damaged: it does not say what was begun there. "
                "Use another target, or pass --overwrite to make everything again."
            )

    def _read_or_refuse(self) -> Json | None:
        job = self._job
        try:
            return _parse(self._read(open_kvstore(job.state_url, job.storage)))
        except WorkerFault as error:
            raise _unusable(error) from None

    def _read(self, store: Any) -> Any:
        job = self._job
        return retry_request(
            "read",
            f"{job.state_url}/{job.record}",
            lambda: store.read(job.record).result(timeout=PATIENCE_SECONDS),
        )


def _parse(result: Any) -> Json | None:
    """Parse the record that was read: None if there is none, and empty if it is damaged."""
    if result.state != "value":
        return None
    try:
        record = parse_json(result.value)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _unusable(error: WorkerFault) -> StateError:
    return StateError(f"the state folder of the target cannot be used: {error}")
