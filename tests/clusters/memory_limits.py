"""Ends a process as a container's memory limit does: by a control group of the kernel."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MOST_BYTES = 4096
"""One page: the kernel does not wait until what the process has is used up."""


@contextmanager
def no_more_memory(name: str) -> Iterator[Callable[[int], None]]:
    """Give a function that lets a process have no more memory than it has.

    The kernel kills it (SIGKILL) once it asks for more. Skips where no control groups may be made.

    Args:
        name: of the control group, which is removed at the end.

    Yields:
        The function, of the process's id.
    """
    version_1 = _CONTROL_GROUPS / "memory"
    group = (version_1 if version_1.exists() else _CONTROL_GROUPS) / name
    limit = group / ("memory.limit_in_bytes" if version_1.exists() else "memory.max")
    try:
        group.mkdir()
        limit.write_text(str(_MOST_BYTES))
    except OSError as error:
        pytest.skip(f"no memory limits can be set here: {error}")

    def deny(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))

    try:
        yield deny
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            group.rmdir()
