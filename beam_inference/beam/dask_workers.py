"""What is set in the processes of Dask's workers, wherever they were started."""

from __future__ import annotations

import sys


def stop_sampling() -> None:
    """Stop Dask's profiler in this process for good, where Python may lock itself up by it.

    It asks for the stacks of all threads every 10 ms. Until Python 3.12 a garbage collection may
    begin meanwhile, and then the interpreter waits for itself if another thread begins or ends
    (https://github.com/python/cpython/issues/106883), as threads that read and write do here. Such
    a worker does nothing more; its scheduler notices that after its worker-ttl, or never.

    It has no effect outside of Dask's tasks.
    """
    if sys.version_info >= (3, 12) or "distributed.worker" not in sys.modules:
        return
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:  # no worker of Dask's runs this
        return
    profiler = worker.periodic_callbacks.get("profile")
    if profiler is not None:
        worker.loop.add_callback(profiler.stop)
