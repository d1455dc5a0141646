"""Measure how long a trainer waits for samples from a store that answers late.

``python -m benchmarks.training`` writes ``benchmarks/results/training.json``. The trainer sleeps
for each step, so that the cores are the store's; the store is that of :mod:`benchmarks.latency`. A
plain loop that reads each batch when it needs it stands beside the stream, for scale.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.config.storage import Gcs, Storage
from beam_inference.config.volumes import VolumeSource
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.training.labelled_volumes import LabelledVolume
from beam_inference.training.samples import Batch, SampleStream
from beam_inference.volumes.outputs import create_output
from benchmarks.latency import server
from benchmarks.measure import machine, take_no_arguments

LATENCY_SECONDS = 0.1
STEP_SECONDS = 0.3
STEPS = 60
BATCH = 2
PATCH = (16, 64, 64)
BLOCK = (32, 64, 64)
SHAPE = (128, 512, 512)
RESULTS = Path(__file__).parent / "results" / "training.json"


def waits(batches: Iterable[Batch], steps: int) -> dict[str, Any]:
    """Take batches, each after a step of sleep; how long they were waited for.

    The wait for the first batch is told apart: a training waits for it once.
    """
    taken = iter(batches)
    begun = time.monotonic()
    next(taken)
    first = time.monotonic() - begun
    waited = []
    for _ in range(steps):
        time.sleep(STEP_SECONDS)
        begun = time.monotonic()
        next(taken)
        waited.append(time.monotonic() - begun)
    return {
        "first_batch_seconds": round(first, 2),
        "waited_seconds": round(sum(waited), 3),
        "waiting_share": round(sum(waited) / (sum(waited) + steps * STEP_SECONDS), 4),
    }


def read_plainly(stream: SampleStream) -> Iterator[Batch]:
    """The batches of a stream, each read when it is asked for."""
    while True:
        taken = iter(stream)
        yield next(taken)
        taken.close()  # type: ignore[attr-defined]


def main() -> None:
    """Measure stream and plain loop, and write the figures."""
    take_no_arguments(__doc__)
    rows = []
    with server(LATENCY_SECONDS) as url:
        storage = Storage(gcs=Gcs(endpoint=url))
        box = BoundingBox((0, 0, 0), SHAPE)
        values = np.random.default_rng(0).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
        for name in ("em", "labels"):
            spec = OutputSpec(
                f"gs://bucket/{name}", "precomputed", "uint8", 1, box, BLOCK, (8.0, 8.0, 8.0),
                storage,
            )  # fmt: skip
            create_output(spec).write(box, values)
        em, labels = (
            VolumeSource(f"gs://bucket/{name}", storage=storage) for name in ("em", "labels")
        )
        for name, ahead_bytes, steps in (("plain", 1, STEPS // 4), ("stream", 2**30, STEPS)):
            stream = SampleStream(
                [LabelledVolume(em, labels)],
                PATCH,
                batch_size=BATCH,
                label_weights={0: 0.5},
                cache_bytes=0,
                ahead_bytes=ahead_bytes,
            )
            batches = read_plainly(stream) if name == "plain" else stream.batches()
            row = {"reading": name, "steps": steps, **waits(batches, steps)}
            print(row, flush=True)
            rows.append(row)
    setting = {"latency": LATENCY_SECONDS, "step": STEP_SECONDS, "batch": BATCH, "patch": PATCH}
    RESULTS.write_text(json.dumps({"machine": machine(), **setting, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
