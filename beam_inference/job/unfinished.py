"""Volumes that a job has written: what it has not done reads as zeros, and it may do more."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass

from beam_inference.config.fields import Json
from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.job.state import State, state_folder_of

logger = logging.getLogger(__name__)


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
    """Warn where a volume's own state folder says that chunks of its job are missing.

    Nothing is said of a volume whose job keeps its state elsewhere, or that no job has written.

    Args:
        url: URL of the volume that is read.
        storage: how object stores are reached.

    Returns:
        How far it is made: what is made of it once it has changed is something else.
    """
    if url.startswith(("http://", "https://")):  # no listing there
        return Making()
    try:
        state = State(state_folder_of(url), storage)
        job = state.load_job()
        if job is None:
            return Making()
        count = job.plan.chunks.count
        done = state.of(job).count_receipts(0, count)
        made_by = " ".join([state.read_id() or "", *state.list_redoing_launches()])
    except (StateError, WorkerFault) as error:
        logger.warning("whether all of %s is done cannot be told: %s", url, error)
        return Making()
    if done < count:
        logger.warning(
            "%s: %d of the %d chunks of its job are not done, and read as zeros here. Finish it "
            "first: beam-inference run",
            url,
            count - done,
            count,
        )
    return Making(max(0, count - done), hashlib.sha256(made_by.encode()).hexdigest()[:16])
