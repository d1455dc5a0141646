"""Volumes of which a job has not done every chunk: what it has not done reads as zeros."""

from __future__ import annotations

import logging

from beam_inference.config.storage import Storage
from beam_inference.errors import StateError, WorkerFault
from beam_inference.job.state import State, state_folder_of

logger = logging.getLogger(__name__)


def warn_if_unfinished(url: str, storage: Storage) -> int:
    """Warn where a volume's own state folder says that chunks of its job are missing.

    Nothing is said of a volume whose job keeps its state elsewhere, or that no job has written.

    Args:
        url: URL of the volume that is read.
        storage: how object stores are reached.

    Returns:
        How many are missing, as far as that can be told. What is made of the volume then is not
        what is made of it once they are done.
    """
    if url.startswith(("http://", "https://")):  # no listing there
        return 0
    try:
        state = State(state_folder_of(url), storage)
        job = state.load_job()
        if job is None:
            return 0
        count = job.plan.chunks.count
        done = state.of(job).count_receipts(0, count)
    except (StateError, WorkerFault) as error:
        logger.warning("whether all of %s is done cannot be told: %s", url, error)
        return 0
    if done < count:
        logger.warning(
            "%s: %d of the %d chunks of its job are not done, and read as zeros here. Finish it "
            "first: beam-inference run",
            url,
            count - done,
            count,
        )
    return max(0, count - done)
