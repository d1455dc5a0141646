"""Errors of a job's state folder before its first chunk, when they are the user's to mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from beam_inference.errors import StateError, WorkerFault


@contextmanager
def state_errors(keys: str = "output.path and job.state_path") -> Iterator[None]:
    """Turn faults of the state folder's store into errors of the user.

    Args:
        keys: what places the folder, to be checked by the user.

    Raises:
        StateError: the state folder could not be read or written.
    """
    try:
        yield
    except WorkerFault as error:
        raise StateError(
            f"the state folder cannot be used: {str(error).removesuffix('.')}. Check {keys}."
        ) from None
