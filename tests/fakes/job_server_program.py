"""A program in the place of java or prism: Beam's own local job service, or a server that fails.

What it does is said by the environment variable STAND_IN: nothing, to serve jobs; ``listen``, to
take connections only; ``ignore``, the same whatever signal but SIGKILL comes, with a child that
does likewise; ``fail``, to end as Java does after an exception.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

STACK = """\
Exception in thread "main" java.lang.RuntimeException: cannot start
\tat org.example.Server.main(Server.java:7)
Caused by: java.net.BindException: Address already in use
\tat java.base/java.lang.Thread.run(Thread.java:840)
\t... 3 more
"""


def port_of(words: list[str]) -> int:
    """The port among the arguments of a job server in Java, or of Prism."""
    found = re.search(r"--job[-_]port[ =](\d+)", " ".join(words))
    assert found is not None, words
    return int(found[1])


def listen(port: int) -> None:
    """Take connections, until the process is ended."""
    with socket.create_server(("localhost", port)):
        while True:
            time.sleep(60)


def note(pid: int) -> None:
    """Write the id of a process where the test looks for it."""
    with Path(os.environ.get("STAND_IN_PIDS", os.devnull)).open("a") as file:
        file.write(f"{pid}\n")


def main(words: list[str]) -> None:
    """Be the server that the environment asks for, or tell the version as Java does."""
    if words == ["-version"]:
        sys.stderr.write('openjdk version "17.0.15" 2025-04-15\n')
        return
    kind = os.environ.get("STAND_IN", "")
    note(os.getpid())
    if kind == "fail":
        sys.stderr.write(STACK)
        sys.exit(1)
    if kind == "ignore":
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        note(child.pid)
    if kind:
        listen(port_of(words))
    from apache_beam.runners.portability import local_job_service_main

    local_job_service_main.run(  # type: ignore[no-untyped-call]
        ["-p", str(port_of(words))]
    )


if __name__ == "__main__":
    main(sys.argv[1:])
