"""Measure what it costs that voxels lie in many small volumes instead of one large volume.

    python -m benchmarks.cohort [--volumes 200] [--milliseconds 15]

Volumes of 96³ voxels are done by one ``run``, and one volume of the same voxels by another, both
from the command line, start-up included. Patches and chunks are the same in number. The network
sleeps for each patch, as one does that runs on a device of its own: what is compared is all that
surrounds it. Then come volumes of 56³, of which each has half the patches of a batch, by two
threads and by four: against the time that their patches take the network. Written to
``benchmarks/results/cohort.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results" / "cohort.json"
SIDE = 96
SMALL_SIDE = 56
SMALL_PATCHES = 8
"""Of a volume; a batch has twice as many."""
MANY = {"volumes": "in/*", "output": "many/{name}", "job": {"state_path": "state"}}
_SECONDS = "COHORT_SECONDS"


def sleeping() -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Make a network that sleeps for each patch, and gives back what it is given."""
    seconds = float(os.environ[_SECONDS])

    def sleep(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        time.sleep(seconds * len(batch))
        return batch

    return sleep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--milliseconds", type=float, default=15.0, help="of a patch")
    known = parser.parse_args()
    os.environ[_SECONDS] = str(known.milliseconds / 1000)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), known.volumes)
    alone = known.volumes * SMALL_PATCHES * known.milliseconds / 1000
    for threads in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            seconds = measure_small(Path(folder), known.volumes, threads)
        figures[f"half_a_batch_each_{threads}_threads"] = {
            "seconds": round(seconds, 1),
            "seconds_of_patches": round(alone, 1),
            "ratio": round(seconds / alone, 3),
        }
    figures |= {
        "machine": machine("apache-beam", "tensorstore", "numpy"),
        "milliseconds_per_patch": known.milliseconds,
    }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def measure(folder: Path, volumes: int) -> dict[str, Any]:
    """Run both jobs; seconds, and the rate of many volumes over that of one."""
    values = _write_volumes(folder / "in", volumes, SIDE)
    _write(folder / "one", np.tile(values, (volumes, 1, 1)))
    jobs = {"many": MANY, "one": {"input": {"path": "one"}, "output": "one_out"}}
    load = os.getloadavg()[0]
    seconds = {name: _run(folder, name, job, SIDE, 4) for name, job in jobs.items()}
    return {
        "volumes": volumes,
        "voxels_of_each": SIDE**3,
        "seconds": {name: round(each, 1) for name, each in seconds.items()},
        "rate_over_one": round(seconds["one"] / seconds["many"], 3),
        "load_before": round(load, 1),
    }


def measure_small(folder: Path, volumes: int, threads: int) -> float:
    """Run a job of volumes that have half the patches of a batch; the seconds that it takes."""
    _write_volumes(folder / "in", volumes, SMALL_SIDE)
    flags = ["--direct_running_mode=multi_threading", f"--direct_num_workers={threads}"]
    return _run(folder, "small", MANY, SMALL_SIDE, 2 * SMALL_PATCHES, flags)


def _write_volumes(folder: Path, volumes: int, side: int) -> NDArray[np.uint8]:
    values = np.random.default_rng(0).integers(0, 256, (side, side, side), dtype=np.uint8)
    for number in range(volumes):
        _write(folder / f"v{number:04}", values)
    return values


def _write(path: Path, values: NDArray[np.uint8]) -> None:
    box = BoundingBox((0, 0, 0), (values.shape[0], values.shape[1], values.shape[2]))
    spec = OutputSpec(f"file://{path}", "precomputed", "uint8", 1, box, (32,) * 3, (8.0,) * 3)
    create_output(spec).write(box, values[None])


def _run(
    folder: Path,
    name: str,
    job: dict[str, Any],
    side: int,
    batch_size: int,
    flags: Sequence[str] = (),
) -> float:
    values = {
        **job,
        "output": {
            "path": job["output"],
            "dtype": "uint8",
            "block_shape": [32, 32, 32],
            "value_range": [0, 1],
        },
        "model": {"path": f"{__file__}:sleeping", "normalize": "unit", "prediction_bound": 1},
        "inference": {
            "patch_shape": [32, 32, 32],
            "patch_overlap": [8, 8, 8],
            "chunk_shape": [-(-side // 32) * 32] * 3,
            "device": "cpu",
            "engine": "numpy",
            "batch_size": batch_size,
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    start = time.monotonic()
    subprocess.run([sys.executable, "-m", "beam_inference", "run", path, *flags], check=True)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
