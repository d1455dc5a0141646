"""Volumes that are made here: what is not done reads as zeros, and more may be done."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import BeamInferenceError
from beam_inference.job.chunk_records import ChunkEntries
from beam_inference.job.stage_job import KINDS_OF_VOLUMES, folder_of, stages_record_of
from beam_inference.job.state import State, state_folder_of
from beam_inference.volumes.kvstores import open_kvstore, read_key

logger = logging.getLogger(__name__)

_MOST_COUNTED = 10**7
"""Chunks whose records are listed, some thousands in a request."""


@dataclass(frozen=True, slots=True)
class Making:
    """How far a job has made a volume, as far as that can be told.

    Attributes:
        missing_chunks: chunks that are not done.
        made_by: a hash that changes where the job was begun anew, or has done chunks again; empty
            if no job is known.
    """

    missing_chunks: int = 0
    made_by: str = ""

    @property
    def description(self) -> Json:
        """JSON values that differ between what is made of the volume before it changes and after.

        They are none for a volume of which no job is known.
        """
        missing = {"missing_chunks": self.missing_chunks} if self.missing_chunks else {}
        return missing | ({"made_by": self.made_by} if self.made_by else {})


def warn_if_unfinished(url: str, storage: Storage) -> Making:
    """Warn where a volume's own state folder says that chunks of what makes it are missing.

    Nothing is said of a volume whose job keeps its state elsewhere, or that nothing of this package
    has written.

    Args:
        url: URL of the volume that is read.
        storage: how object stores are reached.

    Returns:
        How far it is made: what is made of it once it has changed is something else.
    """
    if url.startswith(("http://", "https://")) or "|" in url:  # no listing there
        return Making()
    try:
        making = _making_of_job(url, storage)
        missing = sum(_count_missing(url, storage, kind) for kind in KINDS_OF_VOLUMES)
    except (BeamInferenceError, ValueError) as error:
        logger.warning("whether all of %s is done cannot be told: %s", url, error)
        return Making()
    return replace(making, missing_chunks=making.missing_chunks + missing)


def _making_of_job(url: str, storage: Storage) -> Making:
    """How far a job that runs a network has made a volume.

    Raises:
        StateError, WorkerFault: its state folder cannot be read, or is damaged.
        ValueError: it has too many chunks.
    """
    state = State(state_folder_of(url), storage)
    job = state.load_job()
    if job is None:
        return Making()
    count = _check_countable(job.plan.chunks.count)
    done = state.of(job).count_receipts(0, count)
    made_by = " ".join([state.read_id() or "", *state.list_redoing_launches()])
    if done < count:
        logger.warning(
            "%s: %d of the %d chunks of its job are not done, and read as zeros here. Finish it "
            "first: beam-inference run",
            url,
            count - done,
            count,
        )
    return Making(max(0, count - done), hashlib.sha256(made_by.encode()).hexdigest()[:16])


def _check_countable(count: int) -> int:
    """Refuse a number of chunks whose records take longer to list than a reader would wait.

    Raises:
        ValueError: they do.
    """
    if count > _MOST_COUNTED:
        raise ValueError(f"it is of {count:,} chunks, more than are counted here")
    return count


class _Stages(BaseModel):
    """What a command that makes a volume has recorded of its stages."""

    model_config = ConfigDict(extra="ignore", strict=True)

    fingerprint: str = Field(pattern="^[0-9a-f]{64}$")
    stages: dict[Annotated[str, Field(pattern=r"^[\w-]{1,60}$")], Annotated[int, Field(ge=0)]]


def _count_missing(url: str, storage: Storage, kind: str) -> int:
    """Count the chunks that a command of a kind has not done, and warn of them.

    Raises:
        WorkerFault: its records cannot be read.
        ValueError: what it has recorded of its stages is damaged, or too much.
    """
    state_url = state_folder_of(url)
    store = open_kvstore(state_url, storage)
    content = read_key(store, stages_record_of(kind), state_url)
    if content is None:
        return 0
    record = _Stages.model_validate_json(content)
    folder = folder_of(kind, record.fingerprint)
    count = _check_countable(sum(record.stages.values()))
    done = sum(
        ChunkEntries(store, state_url, storage, f"{folder}/{stage}/done").count(0, chunks)
        for stage, chunks in record.stages.items()
    )
    if done < count:
        logger.warning(
            "%s: %d of the %d chunks of %s, which makes it, are not done: they read as zeros here, "
            "or as what was there before. Give that command again first",
            url,
            count - done,
            count,
            kind,
        )
    return max(0, count - done)
