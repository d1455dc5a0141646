"""Measure the device's waits for an object store that answers in 100 ms; in ``make bench``.

The store is a server of Cloud Storage's protocol on this machine, as a process of its own: input,
output and receipts are in it, and every request waits before it is answered. Compression and
decoding share the cores with the network,
which they would not on a machine with a GPU: the network is given all cores but one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Gcs, Storage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.state import State
from beam_inference.launch.run_job import run_job
from beam_inference.volumes.outputs import create_output

LATENCY_SECONDS = 0.1
TESTS = Path(__file__).parents[1] / "tests"
Z, Y, X = PATCH = (16, 96, 96)
CHUNK = (32, 192, 192)
CHUNKS = (2, 3, 3)


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


def idle_share(latency: float, network: str, engine: str, device: str = "cpu") -> dict[str, Any]:
    """Run a job; the share of time from its first chunk's inference to its last without any."""
    with server(latency) as url, tempfile.TemporaryDirectory() as folder:
        storage = Storage(gcs=Gcs(endpoint=url))
        shape = tuple(n * c for n, c in zip(CHUNKS, CHUNK, strict=True))
        box = BoundingBox((0, 0, 0), (shape[0], shape[1], shape[2]))
        spec = OutputSpec(
            "gs://bucket/in",
            "precomputed",
            "uint8",
            1,
            box,
            (32, 64, 64),
            (8.0, 8.0, 8.0),
            storage,
        )
        create_output(spec).write(
            box, np.random.default_rng(0).integers(0, 256, (1, *box.shape), dtype=np.uint8)
        )
        values = {
            "input": {"path": spec.url},
            "output": {"path": "gs://bucket/out", "dtype": "uint8", "block_shape": [32, 64, 64]},
            "model": {
                "path": network,
                "output_channels": 3,
                "activation": "sigmoid",
                "normalize": "unit",
            },
            "inference": {
                "patch_shape": list(PATCH),
                "patch_overlap": [Z // 4, Y // 4, X // 4],
                "chunk_shape": list(CHUNK),
                "device": device,
                "engine": engine,
                "threads": max(1, len(os.sched_getaffinity(0)) - 1),
            },
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
