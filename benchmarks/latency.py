"""Measure the device's waits for object stores that answer late.

One row of it is in ``make bench``; the whole grid, latencies × seconds of computing × numbers of
chunks, is ``python -m benchmarks.latency``, which writes ``benchmarks/results/latency.json``. Its
network sleeps, so that the cores are the store's.

The store is a server of Cloud Storage's protocol on this machine, as a process of its own: input,
output and receipts are in it, and every request waits before it is answered. Compression and
decoding share the cores with the network,
which they would not on a machine with a GPU: the network is given all cores but one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Gcs, Storage
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.geometry.zyx import Zyx
from beam_inference.job.state import State
from beam_inference.launch.run_job import run_job
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine, take_no_arguments

LATENCY_SECONDS = 0.1
GRID = {"latency": (0.0, 0.1, 0.4), "computing": (0.05, 0.15, 1.5), "chunks": (8, 64)}
"""Seconds of each request, seconds of computing a chunk, and numbers of chunks."""

RESULTS = Path(__file__).parent / "results" / "latency.json"
SECONDS = "SECONDS_OF_A_SLEEPING_NETWORK"
TESTS = Path(__file__).parents[1] / "tests"
Z, Y, X = PATCH = (16, 96, 96)
CHUNK = (32, 192, 192)
CHUNKS = (2, 3, 3)


def sleeping() -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Make a network that sleeps, and gives back what it is given."""

    def sleep(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        time.sleep(float(os.environ[SECONDS]))
        return batch

    return sleep


@contextmanager
def server(latency: float) -> Iterator[str]:
    """A store whose requests each take so long; its URL."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "fakes.gcs",
        "--port",
        "0",
        "--latency",
        str(latency),
        "bucket",
    ]
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        yield url
    finally:
        process.terminate()
        process.wait()


def idle_share(latency: float, network: str, engine: str) -> dict[str, Any]:
    """Run a job of a U-Net; the share of time from its first call to its last without any."""
    model = {"path": network, "output_channels": 3, "activation": "sigmoid", "normalize": "unit"}
    inference = {
        "patch_shape": list(PATCH),
        "patch_overlap": [Z // 4, Y // 4, X // 4],
        "chunk_shape": list(CHUNK),
        "device": "cpu",
        "engine": engine,
        "threads": max(1, len(os.sched_getaffinity(0)) - 1),
    }
    return _idle_share(latency, model, inference, zyx.multiply(CHUNKS, CHUNK), (32, 64, 64))


def idle_share_asleep(latency: float, seconds: float, chunks: int) -> dict[str, Any]:
    """Run a job whose network sleeps so long for each chunk; as :func:`idle_share`."""
    os.environ[SECONDS] = str(seconds)
    patch = (16, 64, 64)
    inference = {
        "patch_shape": list(patch),
        "chunk_shape": list(patch),
        "device": "cpu",
        "engine": "numpy",
    }
    model = {"path": f"{__file__}:sleeping", "normalize": "unit", "prediction_bound": 1}
    return _idle_share(latency, model, inference, (16 * chunks, 64, 64), patch)


def _idle_share(
    latency: float, model: dict[str, Any], inference: dict[str, Any], shape: Zyx, block: Zyx
) -> dict[str, Any]:
    with server(latency) as url, tempfile.TemporaryDirectory() as folder:
        storage = Storage(gcs=Gcs(endpoint=url))
        box = BoundingBox((0, 0, 0), shape)
        spec = OutputSpec(
            "gs://bucket/in",
            "precomputed",
            "uint8",
            1,
            box,
            block,
            (8.0, 8.0, 8.0),
            storage,
        )
        create_output(spec).write(
            box, np.random.default_rng(0).integers(0, 256, (1, *box.shape), dtype=np.uint8)
        )
        values = {
            "input": {"path": spec.url},
            "output": {
                "path": "gs://bucket/out",
                "dtype": "uint8",
                "block_shape": list(block),
                "value_range": [0, 1],
            },
            "model": model,
            "inference": {**inference, "strategy": "recompute"},
            "storage": {"gcs": {"endpoint": url}},
        }
        config = parse_job(values, Path(folder))
        outcome = run_job(config)
        assert outcome.exit_code == 0, outcome
        state = State("gs://bucket/out/_beam_inference", storage)
        job = state.load_job()
        assert job is not None
        receipts = state.of(job).read_receipts(range(job.plan.chunks.count))
    computing = sum(receipt.seconds["infer"] for receipt in receipts)
    ends = [receipt.finished_at.timestamp() - receipt.seconds["write"] for receipt in receipts]
    first = min(end - receipt.seconds["infer"] for end, receipt in zip(ends, receipts, strict=True))
    each = {
        stage: sum(r.seconds[stage] for r in receipts) / len(receipts)
        for stage in ("read", "infer", "write")
    }
    return {
        "idle share": round(1 - computing / (max(ends) - first), 3),
        "pipeline_seconds": round(outcome.seconds, 2),
        "chunks": len(receipts),
        "seconds per chunk": {stage: round(seconds, 3) for stage, seconds in each.items()},
    }


def main() -> None:
    """Measure the whole grid, and write it."""
    take_no_arguments(__doc__)
    rows = []
    for latency, seconds, chunks in product(*GRID.values()):
        row = {"latency": latency, "computing": seconds, "chunks": chunks}
        row |= idle_share_asleep(latency, seconds, int(chunks))
        print(row, flush=True)
        rows.append(row)
    RESULTS.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
