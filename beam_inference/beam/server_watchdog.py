"""A program that runs a server, and ends it as soon as the pipe at standard input is closed.

The system closes that pipe however its writer ends, also where a SIGKILL leaves it no time to end
the server itself. It is started by its path, and imports nothing but the standard library.

    python server_watchdog.py FOLDER COMMAND …

FOLDER is where the server keeps its temporary files; it is removed with the server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

SECONDS_TO_END = 5.0
"""How long a server may take to end by SIGTERM, before it is killed."""


def watch(folder: str, command: Sequence[str]) -> int:
    """Run a server until it ends, or until standard input is at its end.

    Returns:
        The server's exit code.
    """
    # A group of its own: what the server itself starts is ended with it.
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    end = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: end.set())

    def wait_for_end_of_file() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        end.set()

    def wait_for_server() -> None:
        server.wait()
        end.set()

    for wait in (wait_for_end_of_file, wait_for_server):
        threading.Thread(target=wait, daemon=True).start()
    end.wait()
    _end_group(server)
    shutil.rmtree(folder, ignore_errors=True)
    return server.returncode


def _end_group(server: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(SECONDS_TO_END)
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


if __name__ == "__main__":
    code = watch(sys.argv[1], sys.argv[2:])
    # The threads that wait are left where they are; a code below zero names a signal.
    os._exit(code if code >= 0 else 128 - code)
