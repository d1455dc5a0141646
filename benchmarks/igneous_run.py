"""Run in igneous's environment: ``python igneous_run.py FOLDER SCALES``; a pyramid of factor 2.

Run by ``benchmarks.copies``. FOLDER is a precomputed volume; a copy of it is done first, so that
what is loaded late does not count. Prints JSON: seconds of the processor, and the peak of memory
beyond what is held before.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from time import process_time

from igneous.task_creation import create_downsampling_tasks
from taskqueue import LocalTaskQueue

# this file is run by name, where nothing of ours is installed
sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.measure import peak_bytes


def make_scales(folder: Path, count: int) -> None:
    """Make scales, in this process."""
    tasks = create_downsampling_tasks(
        folder.as_uri(), num_mips=count, factor=(2, 2, 2), fill_missing=True, compress=False
    )
    queue = LocalTaskQueue(parallel=1, progress=False)
    queue.insert(tasks)
    queue.execute()


def main() -> None:
    """Measure and print."""
    folder = Path(sys.argv[1])
    count = int(sys.argv[2])
    warm = folder.with_name(f"{folder.name}-first")
    shutil.copytree(folder, warm)
    make_scales(warm, count)
    shutil.rmtree(warm)
    start = process_time()
    peak = peak_bytes(lambda: make_scales(folder, count))
    print(json.dumps({"seconds": process_time() - start, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
