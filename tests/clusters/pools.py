"""Worker pools of Beam, one on each host of a cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from clusters.hosts import Host

POOL_PORT = 50000


def start_pool(host: Host) -> None:
    """Start the worker pool of a host, whose workers run in this environment."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = "apache_beam.runners.worker.worker_pool_main"
    command = [sys.executable, "-m", program, f"--service_port={POOL_PORT}"]
    host.start("pool", command, {"PATH": path, "MALLOC_ARENA_MAX": "1"})
