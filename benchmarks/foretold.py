"""What is foretold against what happens: ``python -m benchmarks.foretold --data FIB25.npy``; half an hour.

Seconds of a job over all of FIB-25 by ``plan --calibrate`` against real runs; a worker's projected memory against
measured peaks, for ten jobs over a volume mirrored from it; and the simulation against jobs over a corner of it that
are killed and started again. Writes ``benchmarks/results/foretold.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from beam_inference.bounding_box import BoundingBox
from beam_inference.calibration import calibrate, totals
from beam_inference.cost import chunk_seconds
from beam_inference.job_file import parse_job
from beam_inference.launch import tried
from beam_inference.outputs import OutputSpec, create_output
from beam_inference.runner import run_job
from beam_inference.simulation import Workload, simulate_many
from beam_inference.state import State
from beam_inference.storage import Gcs, Storage
from beam_inference.survey import THIS_PROCESS, survey
from benchmarks.bench import worker_figures
from benchmarks.latency import LATENCY_SECONDS, server
from benchmarks.measure import machine
from tests.networks.meshnet import meshnet

RESULTS = Path(__file__).parent / "results" / "foretold.json"
NETWORKS = Path(__file__).parents[1] / "tests" / "networks"
TRAINED = {
    "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
    "weights": str(NETWORKS / "fib25.safetensors"),
    "output_channels": 3,
    "activation": "sigmoid",
    "normalize": "unit",
}


CORNER, WIDE = (96, 192, 192), (96, 768, 768)
"""Shapes, ZYX: of a piece of FIB-25, and of what is mirrored from it."""


def write_volume(url: str, array: NDArray[Any], storage: Storage = Storage()) -> None:  # noqa: B008  # a value
    """Of uint8 voxels, in blocks of 64×64×64."""
    box = BoundingBox((0, 0, 0), array.shape)
    spec = OutputSpec(url, "precomputed", "uint8", 1, box, (64, 64, 64), (10.0, 10.0, 10.0), storage)
    create_output(spec).write(box, np.ascontiguousarray(array[None]))


def widened(whole: NDArray[Any]) -> NDArray[Any]:
    """A volume of the shape :data:`WIDE`, mirrored from another one."""
    margins = [(0, max(0, wide - n)) for wide, n in zip(WIDE, whole.shape, strict=True)]
    return np.pad(whole[: WIDE[0]], margins, mode="reflect")


def values_of(where: str, volume: str, output: str, **inference: Any) -> dict[str, Any]:
    """A job over one of the volumes with the trained network of the tests; ``where`` is a folder's URL."""
    keys = {"patch_shape": [20, 48, 48], "patch_overlap": [4, 16, 16], "chunk_shape": [32, 64, 64], "batch_size": 2}
    return {
        "input": {"path": f"{where}/{volume}"},
        "output": {"path": f"{where}/{output}", "dtype": "uint8", "block_shape": [32, 64, 64]},
        "model": TRAINED,
        "inference": {**keys, "device": "cpu", **inference},
    }


def without_startup(output: str) -> float:
    """Seconds from when a job's first chunk was begun to when its last one was finished."""
    state = State(f"{output}/_beam_inference")
    job = state.load_job()
    assert job is not None
    state, chunks = state.of(job), range(job.plan.chunks.count)
    receipts = state.read_receipts(chunks)
    first = [r.finished_at.timestamp() - sum(r.seconds.values()) for r in state.read_sums(chunks) or receipts]
    return max(receipt.finished_at.timestamp() for receipt in receipts) - min(first)


def seconds(folder: Path, repeats: int) -> dict[str, Any]:
    """Foretold and real seconds of jobs, each calibrated anew before its run."""
    rows = {}
    for engine, seams in product(("openvino", "torch"), ("recompute", "exchange")):
        ratios = []
        for repeat in range(repeats):
            keys = {"engine": engine, "seams": seams, "chunk_shape": [64, 128, 128]}
            config = parse_job(values_of(f"file://{folder}", "whole", f"{engine}-{seams}-{repeat}", **keys), folder)
            found, predictor = tried(survey(config), THIS_PROCESS, allow_pickle=False)
            whole = totals(found)
            foretold = chunk_seconds(calibrate(found, predictor), whole) * whole.chunks
            outcome = run_job(config)
            assert outcome.exit_code == 0, outcome
            ratios.append(foretold / without_startup(config.output.path))
        rows[f"{engine}, {seams}"] = {"foretold / real": round(median(ratios), 3), "all": [round(r, 3) for r in ratios]}
        print(engine, seams, rows[f"{engine}, {seams}"], flush=True)
    return rows


UNET = {
    "path": f"{Path(__file__).with_name('bench.py')}:unet",
    "output_channels": 3,
    "activation": "sigmoid",
    "normalize": "unit",
}
MESHNET = {**UNET, "path": f"{__file__}:seeded_meshnet", "activation": "softmax"}
AFFINITIES = {**TRAINED, "channels": [{"affinity": [-1, 0, 0]}, {"affinity": [0, -1, 0]}, {"affinity": [0, 0, -1]}]}
SMOOTH = [{"operator": "smooth", "sigma": [0.5, 1, 1]}]


def seeded_meshnet() -> torch.nn.Module:
    """A network at full resolution throughout, the same at every call."""
    torch.manual_seed(0)
    return meshnet()


def memory_jobs() -> dict[str, dict[str, Any]]:
    """By what is said of each: what it has over :func:`values_of`. None is of those that the constants came from."""

    def of(
        model: dict[str, Any], dtype: str, chunk: list[int], batch: int, stop: list[int], **more: Any
    ) -> dict[str, Any]:
        keys = {"chunk_shape": chunk, "batch_size": batch, "patch_overlap": [4, 16, 16]}
        unet = {"patch_shape": [16, 96, 96], "patch_overlap": [4, 24, 24]} if model is UNET else {}
        postprocess = more.pop("postprocess", [])
        return {
            "model": model,
            "output": {"dtype": dtype},
            "roi": {"start": [0, 0, 0], "stop": stop},
            "postprocess": postprocess,
            "inference": {**keys, **unet, **more},
        }

    deep = {"patch_shape": [24, 64, 64], "patch_overlap": [8, 16, 16]}
    return {
        "torch, `recompute`, residual U-Net": of(UNET, "uint8", [64, 256, 256], 1, [64, 512, 512], engine="torch"),
        "torch, `recompute`, patches 24×64×64 by four": of(
            TRAINED, "uint8", [96, 192, 384], 4, [96, 576, 768], engine="torch", **deep
        ),
        "torch, `exchange`, patches 24×64×64": of(
            TRAINED, "uint8", [64, 384, 384], 1, [96, 768, 768], engine="torch", seams="exchange", **deep
        ),
        "torch, `recompute`, smoothed": of(
            TRAINED, "uint8", [96, 192, 256], 2, [96, 576, 768], engine="torch", postprocess=SMOOTH
        ),
        "torch, `recompute`, float32, augmented": of(
            AFFINITIES, "float32", [32, 128, 128], 2, [64, 256, 256], engine="torch", augment="xy"
        ),
        "torch, `recompute`, MeshNet, patches 32×96×96": of(
            MESHNET, "uint8", [96, 256, 256], 1, [96, 512, 512], engine="torch", patch_shape=[32, 96, 96]
        ),
        "OpenVINO, `exchange`, residual U-Net": of(
            UNET, "uint8", [64, 256, 256], 1, [96, 512, 512], engine="openvino", seams="exchange"
        ),
        "OpenVINO, `crop`, float32": of(
            TRAINED, "float32", [32, 384, 384], 4, [96, 768, 768], engine="openvino", seams="crop"
        ),
        "OpenVINO, `exchange`, uint16": of(
            TRAINED, "uint16", [96, 256, 384], 8, [96, 768, 768], engine="openvino", seams="exchange"
        ),
        "ONNX Runtime, `recompute`": of(TRAINED, "uint8", [64, 256, 384], 2, [96, 768, 768], engine="onnxruntime"),
    }


def memory(folder: Path, wide: NDArray[Any], repeats: int) -> dict[str, Any]:
    """Peaks of ten jobs, each in a process of its own, over the projections.

    On a store that takes 100 ms to answer, which is what is projected, and on this machine's disk, where most of a
    chunk is written before the next one takes memory.
    """
    rows: dict[str, Any] = {}
    with server(LATENCY_SECONDS) as endpoint:
        slow = Storage(gcs=Gcs(endpoint=endpoint))
        for place, where, storage in (("slow store", "gs://bucket", slow), ("disk", f"file://{folder}", Storage())):
            write_volume(f"{where}/wide", wide, storage)
            for (number, (name, job)), repeat in product(enumerate(memory_jobs().items()), range(repeats)):
                values = values_of(where, "wide", f"memory{number}-{repeat}", **job["inference"])
                values["output"] |= job["output"]
                values |= {key: job[key] for key in ("model", "roi", "postprocess")}
                values["storage"] = storage.model_dump(mode="json")
                figures = worker_figures(folder, values)
                ratio = round(figures["peak_bytes"] / figures["projected_bytes"], 3)
                row = rows.setdefault(name, {}).setdefault(place, {"measured / projected": [], "peak_bytes": []})
                row["measured / projected"].append(ratio)
                row["peak_bytes"].append(figures["peak_bytes"])
                print(place, name, ratio, figures, flush=True)
    return rows


def killed(folder: Path, runs: int) -> dict[str, Any]:
    """A job that is killed at random moments and started again, until it is complete."""
    random = np.random.default_rng(0)
    name = "undisturbed"

    def launch(output: str) -> subprocess.Popen[bytes]:
        path = folder / f"{output}.yaml"
        path.write_text(yaml.safe_dump(values_of(f"file://{folder}", "corner", output, engine="torch", threads=1)))
        command = [sys.executable, "-W", "ignore", "-m", "beam_inference", "run", str(path)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    start = time.monotonic()
    assert launch(name).wait() == 0
    undisturbed = time.monotonic() - start
    state = State(f"file://{folder / name}/_beam_inference")
    job = state.load_job()
    assert job is not None
    receipts = state.of(job).read_receipts(range(job.plan.chunks.count))
    each = [receipt.seconds["infer"] for receipt in receipts]
    startup = undisturbed - sum(each)
    between = undisturbed / 2
    work = Workload(len(each), mean(each), stdev(each) / mean(each), 1, startup, 3600 / between)
    real = []
    for number in range(runs):
        begun = time.monotonic()
        while True:
            process, lives = launch(f"killed{number}"), float(random.exponential(between))
            try:
                assert process.wait(lives) == 0
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        real.append(time.monotonic() - begun)
        print("killed", number, round(real[-1], 1), flush=True)
    foretold = mean(run.seconds for run in simulate_many(work))
    return {
        "foretold / real": round(foretold / mean(real), 3),
        "foretold_seconds": round(foretold, 1),
        "real_seconds": [round(r, 1) for r in real],
        "undisturbed_seconds": round(undisturbed, 1),
        "startup_seconds": round(startup, 1),
        "seconds_between_kills": round(between, 1),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="fib25_medulla_train2_image.npy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--memory-repeats", type=int, default=3, help="runs of each job in each place")
    parser.add_argument("--kills", type=int, default=10, help="jobs that are killed")
    parser.add_argument("--parts", nargs="+", choices=("memory", "seconds", "killed"), help="these anew; others stay")
    known = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if known.parts and RESULTS.exists() else {}
    results["machine"] = machine("torch", "openvino", "onnxruntime")
    with tempfile.TemporaryDirectory() as name:
        folder, whole = Path(name), np.load(known.data)
        z, y, x = CORNER
        write_volume(f"file://{folder}/whole", whole)
        write_volume(f"file://{folder}/corner", whole[:z, :y, :x])
        parts: dict[str, Callable[[], Any]] = {
            "memory": lambda: memory(folder, widened(whole), known.memory_repeats),
            "seconds": lambda: seconds(folder, known.repeats),
            "killed": lambda: killed(folder, known.kills),
        }
        for part in known.parts or parts:
            results[part] = parts[part]()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")  # what was measured stays if it is stopped
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
