"""Locks on files of this machine, which the system takes back when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tenacity

logger = logging.getLogger(__name__)

_NO_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}
"""Errors of file systems that are mounted without locks."""


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


@contextmanager
def hold_lock(path: Path, seconds: float) -> Iterator[None]:
    """Hold a lock that the system takes back when its holder dies.

    The file is removed at the end; whoever waited for it then holds a file that has no name any
    more, and begins again. Where the file system has no locks, a warning says so.

    Args:
        path: of the file that is locked, which is created.
        seconds: how long to wait for another holder.

    Raises:
        TimeoutError: another process holds it for longer than that.
        OSError: the file cannot be opened, is no plain one, or has another name, too; a link is not
            followed.
    """
    descriptor = _open_locked(path, seconds)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _open_locked(path: Path, seconds: float) -> int:
    """Wait until a file of that name is ours; who is interrupted meanwhile leaves it as it is."""
    while True:
        # a link in its place is an error: nothing is created where it leads to
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o666)
        is_ours = False
        try:
            _check_plain(descriptor, path)
            is_ours = _holds(descriptor, path, seconds)
        finally:
            if not is_ours:
                os.close(descriptor)
        if is_ours:
            return descriptor


def _check_plain(descriptor: int, path: Path) -> None:
    """Refuse what is no file of its own. Raises OSError."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "it is a file that has another name elsewhere", str(path))


def _holds(descriptor: int, path: Path, seconds: float) -> bool:
    """Wait for the lock on an open file; whether the file still has its name then."""
    try:
        lock_file(descriptor, path, seconds)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: the file system has no locks; do not run two of these at the same time", path
        )
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
