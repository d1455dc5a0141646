"""How much the job adds to the bare network: ``make bench``, or ``python -m benchmarks.bench [--repeats 5]``.

Each row is a ratio from runs taken in turn, A B A B, so that a machine whose speed drifts does not matter. Writes
``benchmarks/results/job.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from beam_inference.bounding_box import BoundingBox
from beam_inference.chunk_inference import infer_chunk
from beam_inference.demo import tissue
from beam_inference.demo.tissue import tissue_network
from beam_inference.job_file import parse_job
from beam_inference.operators.normalize import unit
from beam_inference.outputs import OutputSpec, create_output
from beam_inference.plan import ChunkWork, make_plan
from beam_inference.predictors.identity import IdentityPredictor
from beam_inference.predictors.torch_predictor import TorchPredictor
from beam_inference.runner import run_job
from beam_inference.state import ChannelStatistics, Receipt, State
from beam_inference.survey import survey

SHAPE = (96, 192, 192)
PATCH, OVERLAP, BATCH = (32, 64, 64), (8, 16, 16), 4
RESULTS = Path(__file__).parent / "results" / "job.json"


def ratio(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> dict[str, float]:
    """Seconds of both, run in turn after one warm-up each, and the median of the pairwise ratios first / second."""
    pairs = []
    for repeat in range(repeats + 1):
        times = []
        for action in (first, second):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        if repeat:
            pairs.append(times)
    ratios = sorted(a / b for a, b in pairs)
    return {
        "ratio": round(median(ratios), 3),
        "min": round(ratios[0], 3),
        "max": round(ratios[-1], 3),
        "seconds": round(median(a for a, _ in pairs), 3),
        "against_seconds": round(median(b for _, b in pairs), 3),
    }


def whole_volume_work() -> ChunkWork:
    box = BoundingBox((0, 0, 0), SHAPE)
    plan = make_plan(
        volume=box,
        roi=box,
        context=(0, 0, 0),
        patch_shape=PATCH,
        patch_overlap=OVERLAP,
        chunk_shape=SHAPE,
        crop_margin=(0, 0, 0),
        seams="recompute",
        chunk_crop_margin=(0, 0, 0),
    )
    return plan.work(0)


def bare_forward(network: torch.nn.Module, calls: int) -> Callable[[], None]:
    batch = torch.rand(BATCH, 1, *PATCH)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(calls):
                network(batch).softmax(1)

    return run


def loop_against_forward(repeats: int) -> dict[str, float]:
    """One chunk, from the uint8 cutout to the blended float32 core, against the same forward passes alone."""
    network, work = tissue_network().eval(), whole_volume_work()
    predictor = TorchPredictor(network, torch.device("cpu"), activation="softmax", threads=torch.get_num_threads())
    cutout = np.random.default_rng(0).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
    normalize = unit(cutout.dtype)
    return ratio(
        lambda: infer_chunk(cutout, work, predictor, normalize, 3, BATCH),
        bare_forward(network, -(-work.patch_count // BATCH)),
        repeats,
    )


def null_loop_per_patch(repeats: int) -> dict[str, float]:
    """The loop with a network that does nothing, against copying the same patches once, as the least anyone must do."""
    work = whole_volume_work()
    cutout = np.random.default_rng(0).random((1, *SHAPE), np.float32)
    boxes = [work.lattice.patch_box((z, y, x)) for z, y, x in product(*work.patches)]

    def copies() -> None:
        for box in boxes:
            cutout[(slice(None), *box.slices_in(work.input_box))].copy()

    return ratio(lambda: infer_chunk(cutout, work, IdentityPredictor(), lambda batch: batch, 1, BATCH), copies, repeats)


def job_values(folder: Path, output: str) -> dict[str, Any]:
    return {
        "input": {"path": str(folder / "in")},
        "output": {"path": str(folder / output), "dtype": "uint8", "block_shape": [48, 48, 48]},
        "model": {
            "path": "beam_inference.demo.tissue:tissue_network",
            "weights": str(Path(tissue.__file__).with_suffix(".safetensors")),
            "output_channels": 3,
            "activation": "softmax",
            "normalize": "unit",
        },
        "inference": {
            "patch_shape": list(PATCH),
            "patch_overlap": list(OVERLAP),
            "chunk_shape": [96, 96, 96],
            "batch_size": BATCH,
            "device": "cpu",
        },
    }


def write_input(folder: Path) -> None:
    box = BoundingBox((0, 0, 0), SHAPE)
    spec = OutputSpec(f"file://{folder}/in", "precomputed", "uint8", 1, box, (64, 64, 64), (8.0, 8.0, 8.0))
    create_output(spec).write(box, np.random.default_rng(0).integers(0, 256, (1, *SHAPE), dtype=np.uint8))


def job_against_forward(repeats: int) -> dict[str, float]:
    """A whole job through Beam's local runner, checks and start-up of the runner included, imports not."""
    network = tissue_network().eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder)
        numbers = iter(range(1000))
        config = parse_job(job_values(folder, "out"), folder)
        plan = survey(config).job.plan
        calls = sum(-(-plan.work(index).patch_count // BATCH) for index in range(plan.chunks.count))

        def job() -> None:
            outcome = run_job(parse_job(job_values(folder, f"out{next(numbers)}"), folder))
            assert outcome.exit_code == 0, outcome

        return ratio(job, bare_forward(network, calls), repeats)


_MEASURE_MEMORY = """
import json, sys
from dataclasses import replace
from pathlib import Path
from beam_inference.job_file import parse_job
from beam_inference.launch import prepare
from beam_inference.survey import Place, survey
from beam_inference.worker import Worker
config = parse_job(json.loads(sys.argv[1]), Path(sys.argv[2]))
worker = Worker(prepare(config))
projected = replace(survey(config), job=worker.job).memory(Place(threads_per_process=1)).host_bytes
Path("/proc/self/clear_refs").write_text("5")
def status(key):
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith(key)) * 1024
before = status("VmRSS")
list(worker.do(range(worker.job.plan.chunks.count)))
print(status("VmHWM") - before, projected)
"""


def memory_against_projection() -> dict[str, float]:
    """Peak memory of one worker doing the job in one thread, over what it held before, against the projection."""
    with tempfile.TemporaryDirectory() as name:
        write_input(Path(name))
        command = [sys.executable, "-c", _MEASURE_MEMORY, json.dumps(job_values(Path(name), "out")), name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    measured, projected = map(int, printed.split())
    return {"ratio": round(measured / projected, 3), "measured_bytes": measured, "projected_bytes": projected}


def receipts_per_second() -> dict[str, float]:
    """Durable receipts written one after the other to a local folder, and listed."""
    with tempfile.TemporaryDirectory() as name:
        state, count = State(f"file://{name}", fingerprint="0" * 64), 2000
        channel = ChannelStatistics(min=0, max=1, mean=0.5, zeros=0, nans=0)
        start = time.perf_counter()
        for chunk in range(count):
            state.write_receipt(
                Receipt.model_validate(
                    {
                        "chunk": chunk,
                        "box": {"start": (0, 0, 0), "stop": (1, 1, 1)},
                        "crc32": 0,
                        "channels": [channel],
                        "batch_size": 1,
                        "uniform_patches": 0,
                        "seconds": {"read": 0.1, "infer": 0.1, "write": 0.1},
                        "attempts": {"read": 1, "infer": 1, "write": 1},
                        "finished_at": datetime.now(UTC),
                        "worker": "bench:0",
                        "launch": "bench",
                        "fingerprint": "0" * 64,
                    }
                )
            )
        written = time.perf_counter() - start
        start = time.perf_counter()
        listed = state.count_receipts(0, count)
        return {
            "written_per_second": round(count / written),
            "listed_per_second": round(listed / (time.perf_counter() - start)),
        }


def main() -> None:
    """Measure all rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    rows = {
        "patch loop / bare forward (tissue network, one chunk)": loop_against_forward(repeats),
        "patch loop with a null network / copying the patches once": null_loop_per_patch(repeats),
        "whole job without imports / bare forward of the same patches": job_against_forward(repeats),
        "peak memory of a worker / projection": memory_against_projection(),
        "receipts on a local disk": receipts_per_second(),
    }
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "repeats": repeats, "rows": rows}, indent=1) + "\n")
    for name, row in rows.items():
        print(f"{name}\n    {row}")


if __name__ == "__main__":
    main()
