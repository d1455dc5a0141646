"""Receipts at scale: a null network over many tiny chunks, to see what the engine itself costs.

    python -m benchmarks.load [--chunks 100000] [--folder FOLDER]

A volume of 4×4×4-voxel chunks is run to its end on the local runner, then again with one receipt in
a hundred deleted, and its status is asked for. Written to ``benchmarks/results/load.json``: chunks
per second, the process's memory as the job goes on, and the seconds that resume and status take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.state import State
from beam_inference.volumes.outputs import create_output

EDGE = 4
RESULTS = Path(__file__).parent / "results" / "load.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="where to work; default a temporary folder")
    known = parser.parse_args()
    folder = known.folder or Path(tempfile.mkdtemp(prefix="load"))
    try:
        figures = measure(folder, known.chunks)
    finally:
        if known.folder is None:
            shutil.rmtree(folder)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def measure(folder: Path, chunks: int) -> dict[str, Any]:
    """Run, resume and ask for the status of a job of at least so many chunks."""
    side = math.ceil(chunks ** (1 / 3))
    write_job(folder, side * EDGE)
    first = run(folder)
    state = State(f"file://{folder}/out/_beam_inference")
    job = state.load_job()
    assert job is not None
    count = job.plan.chunks.count
    receipts = sorted((folder / "out" / "_beam_inference" / "receipts").rglob("*.json"))
    assert len(receipts) == count
    for receipt in receipts[::100]:
        receipt.unlink()
    resumed = run(folder)
    start = time.monotonic()
    subprocess.run(
        [*COMMAND, "status", str(folder / "job.yaml")], check=True, stdout=subprocess.DEVNULL
    )
    status_seconds = time.monotonic() - start
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "chunks": count,
        "first": first | {"chunks_per_second": round(count / first["seconds"])},
        "resume_of_one_percent": resumed,
        "status_seconds": round(status_seconds, 1),
        "state_megabytes": round(
            sum(path.stat().st_size for path in receipts[1::100]) * 100 / 99 * 100 / 1e6, 1
        ),
    }


def write_job(folder: Path, edge: int) -> None:
    """A volume of edge³ voxels, and a job of 4×4×4-voxel chunks over it."""
    box = BoundingBox((0, 0, 0), (edge, edge, edge))
    spec = OutputSpec(
        url=f"file://{folder}/in",
        format="precomputed",
        dtype="uint8",
        channels=1,
        bounds=box,
        block_shape=(32, 32, 32),
        voxel_size_nm=(10.0, 10.0, 10.0),
    )
    create_output(spec).write(
        box, np.random.default_rng(0).integers(0, 256, (1, *box.shape), dtype=np.uint8)
    )
    tiny = [EDGE] * 3
    job = {
        "input": {"path": "in"},
        "output": {"path": "out", "dtype": "uint8", "block_shape": tiny, "value_range": [0, 255]},
        "model": {"path": "identity"},
        "inference": {"patch_shape": tiny, "chunk_shape": tiny, "device": "cpu"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


COMMAND = [sys.executable, "-m", "beam_inference"]


def run(folder: Path) -> dict[str, Any]:
    """Run the job as a process, and watch its memory."""
    start = time.monotonic()
    megabytes = []
    with subprocess.Popen(
        [*COMMAND, "run", str(folder / "job.yaml")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        while process.poll() is None:
            megabytes.append(resident(process.pid))
            time.sleep(0.5)
    assert process.returncode == 0
    seconds = time.monotonic() - start
    quarters = [megabytes[len(megabytes) * k // 4] for k in (1, 2, 3)]
    return {
        "seconds": round(seconds, 1),
        "resident_megabytes_at_quarters": quarters,
        "peak": max(megabytes),
    }


def resident(pid: int) -> int:
    """Resident memory of a process, in megabytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    lines = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(lines[0].split()[1]) // 1000 if lines else 0


if __name__ == "__main__":
    main()
