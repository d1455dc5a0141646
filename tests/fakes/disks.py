"""Disks that are full or read-only, seen by one command and its children only."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest


def run_on_disk(
    command: Sequence[str], folder: Path, options: str, copy: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds a small disk in a folder; skip the test where that cannot be had.

    Args:
        command: what to run, in the current folder.
        folder: where the disk is mounted; what lies there is not seen.
        options: how it is mounted, such as ``size=1m`` or ``ro``.
        copy: where its contents are copied afterwards.
    """
    where = shlex.quote(str(folder))
    mount = f"mount -t tmpfs -o {options} none {where}"
    namespace = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    can_mount = shutil.which("unshare") is not None
    if not can_mount or subprocess.run([*namespace, mount], capture_output=True).returncode:
        pytest.skip("no disk can be mounted here without privileges")
    script = f"{mount}; {shlex.join(command)}; code=$?; cp -r {where} {copy}; exit $code"
    return subprocess.run([*namespace, script], capture_output=True, text=True)
