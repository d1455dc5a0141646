"""Locks on files of this machine, which the system takes back when their holder dies."""

from __future__ import annotations

import fcntl
from pathlib import Path

import tenacity


def lock_file(descriptor: int, path: Path, seconds: float) -> None:
    """Wait for the lock on an open file, but not for ever: its holder may be stopped.

    Args:
        descriptor: of the open file; the lock is given back when it is closed.
        path: of the file, for messages.
        seconds: how long to wait.

    Raises:
        TimeoutError: another process holds it for longer than that.
        OSError: the file system has no locks.
    """
    asking = tenacity.Retrying(
        stop=tenacity.stop_after_delay(seconds),
        wait=tenacity.wait_random_exponential(multiplier=0.01, max=0.2),
        retry=tenacity.retry_if_exception_type(BlockingIOError),
        reraise=True,
    )
    try:
        asking(fcntl.flock, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TimeoutError(
            f"another process has held the lock on {path} for {seconds:g} s; it may be stopped. "
            "Let it go on (kill -CONT), or end it"
        ) from None
