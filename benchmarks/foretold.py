"""Compare estimates with runs: ``python -m benchmarks.foretold --data FIB25.npy``; 90 minutes.

Seconds of a job over all of FIB-25 by ``plan --calibrate`` against real runs; a worker's projected
memory against measured peaks, for ten jobs over a volume mirrored from it; and the simulation
against jobs over a corner of it that are killed and started again. Writes
``benchmarks/results/foretold.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Gcs, Storage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.place import THIS_PROCESS
from beam_inference.launch.calibration import calibrate
from beam_inference.launch.cost import chunk_seconds, job_totals
from beam_inference.launch.engine_trial import try_network_here
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.run_job import run_job
from beam_inference.launch.simulation import Workload, simulate_many
from beam_inference.models.trust import Trust
from beam_inference.volumes.outputs import create_output
from benchmarks.bench import worker_figures
from benchmarks.latency import LATENCY_SECONDS, server
from benchmarks.measure import machine, work_of
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

BENCH = Path(__file__).with_name("bench.py")
AFFINITIES = {
    **TRAINED,
    "channels": [{"affinity": [-1, 0, 0]}, {"affinity": [0, -1, 0]}, {"affinity": [0, 0, -1]}],
}
MESHNET = {
    "path": f"{__file__}:seeded_meshnet",
    "output_channels": 3,
    "activation": "softmax",
    "normalize": "unit",
}
UNET, SMALL_UNET = (
    {**MESHNET, "path": f"{BENCH}:{name}", "activation": "sigmoid"}
    for name in ("unet", "small_unet")
)
MASKS: list[dict[str, Any]] = [
    {"operator": "select", "channels": [1, 2]},
    {"operator": "threshold", "at": 0.5},
]

CORNER = (96, 192, 192)
WIDE = (96, 768, 768)
"""Shapes, ZYX: of a piece of FIB-25, and of what is mirrored from it."""


# a value
def write_volume(url: str, array: NDArray[Any], storage: Storage = Storage()) -> None:  # noqa: B008
    """Of uint8 voxels, in blocks of 64×64×64."""
    box = BoundingBox((0, 0, 0), array.shape)
    spec = OutputSpec(
        url, "precomputed", "uint8", 1, box, (64, 64, 64), (10.0, 10.0, 10.0), storage
    )
    create_output(spec).write(box, np.ascontiguousarray(array[None]))


def widened(whole: NDArray[Any]) -> NDArray[Any]:
    """A volume of the shape :data:`WIDE`, mirrored from another one."""
    margins = [(0, max(0, wide - n)) for wide, n in zip(WIDE, whole.shape, strict=True)]
    return np.pad(whole[: WIDE[0]], margins, mode="reflect")


def values_of(where: str, volume: str, output: str, **inference: Any) -> dict[str, Any]:
    """Make a job over a volume with the tests' trained network; ``where`` is a folder's URL."""
    keys = {
        "patch_shape": [20, 48, 48],
        "patch_overlap": [4, 16, 16],
        "chunk_shape": [32, 64, 64],
        "batch_size": 2,
    }
    return {
        "input": {"path": f"{where}/{volume}"},
        "output": {"path": f"{where}/{output}", "dtype": "uint8", "block_shape": [32, 64, 64]},
        "model": TRAINED,
        "inference": {**keys, "device": "cpu", **inference},
    }


def seconds(folder: Path, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield estimated and measured seconds of jobs, each calibrated anew, after each job."""
    rows = {}
    for engine, seams in product(("openvino", "torch"), ("recompute", "exchange")):
        ratios = []
        for repeat in range(repeats):
            keys = {"engine": engine, "seams": seams, "chunk_shape": [64, 128, 128]}
            config = parse_job(
                values_of(f"file://{folder}", "whole", f"{engine}-{seams}-{repeat}", **keys),
                folder,
            )
            job = plan_job(config)
            trial = try_network_here(job, THIS_PROCESS, trust=Trust.NOTHING)
            whole = job_totals(job, batch_size=trial.needs.batch_size)
            foretold = chunk_seconds(calibrate(job, trial), whole) * whole.chunks
            outcome = run_job(config)
            assert outcome.exit_code == 0, outcome
            first, last, _ = work_of(config.output.path)
            ratios.append(foretold / (last - first))
        rows[f"{engine}, {seams}"] = {
            "foretold / real": round(median(ratios), 3),
            "all": [round(r, 3) for r in ratios],
        }
        print(engine, seams, rows[f"{engine}, {seams}"], flush=True)
        yield rows


def seeded_meshnet() -> torch.nn.Module:
    """A network at full resolution throughout, the same at every call."""
    torch.manual_seed(0)
    return meshnet()


def memory_jobs() -> dict[str, dict[str, Any]]:
    """By what is said of each: its sections, over those of :func:`values_of`.

    The constants of the projection are chosen by earlier runs of these and others.
    """

    def job(
        chunk: tuple[int, int, int],
        patch: tuple[int, int, int],
        overlap: tuple[int, int, int],
        batch: int,
        *,
        model: dict[str, Any] = TRAINED,
        dtype: str = "uint8",
        roi: tuple[int, int, int] = WIDE,
        postprocess: Sequence[dict[str, Any]] = (),
        **inference: Any,
    ) -> dict[str, Any]:
        shapes = {
            "chunk_shape": list(chunk),
            "patch_shape": list(patch),
            "patch_overlap": list(overlap),
        }
        return {
            "model": model,
            "output": {"dtype": dtype},
            "roi": {"start": [0, 0, 0], "stop": list(roi)},
            "postprocess": list(postprocess),
            "inference": {**shapes, "batch_size": batch, **inference},
        }

    cube = (96, 256, 256)
    narrow = (64, 192, 192)
    deep = ((24, 64, 64), (8, 16, 16))
    wide = ((16, 96, 96), (4, 24, 24))
    small = ((20, 48, 48), (4, 16, 16))
    return {
        "torch, residual U-Net": job(
            narrow, *wide, 1, model=UNET, roi=(64, 384, 768), engine="torch"
        ),
        "torch, patches 24×64×64 by three": job(cube, *deep, 3, engine="torch"),
        "torch, `exchange`, float32, patches 24×64×64": job(
            (96, 192, 384), *deep, 2, dtype="float32", engine="torch", seams="exchange"
        ),
        "torch, two masks of three channels": job(
            cube, *small, 2, postprocess=MASKS, engine="torch"
        ),
        "torch, float32, augmented": job(
            narrow,
            *small,
            1,
            model=AFFINITIES,
            dtype="float32",
            roi=(64, 384, 768),
            engine="torch",
            augment="xy",
        ),
        "torch, MeshNet": job(narrow, *deep, 1, model=MESHNET, roi=(64, 768, 768), engine="torch"),
        "OpenVINO, `exchange`, small U-Net": job(
            cube,
            (16, 96, 96),
            (4, 32, 32),
            1,
            model=SMALL_UNET,
            engine="openvino",
            seams="exchange",
        ),
        "OpenVINO, `crop`, uint16": job(
            (64, 256, 256), *small, 2, dtype="uint16", engine="openvino", seams="crop"
        ),
        "OpenVINO, `exchange`, by four": job(
            (96, 192, 256), (32, 48, 48), (8, 16, 16), 4, engine="openvino", seams="exchange"
        ),
        "ONNX Runtime, float32": job(cube, *small, 1, dtype="float32", engine="onnxruntime"),
    }


def memory(
    folder: Path, wide: NDArray[Any], repeats: int, jobs: dict[str, Any], others: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield peaks of jobs over their projections, each in a process of its own, after each job.

    On a store that takes 100 ms to answer, which is what is projected, and on this machine's disk,
    where most of a chunk is written before the next one takes memory.
    """
    rows = others | {name: {} for name in jobs}
    with server(LATENCY_SECONDS) as endpoint:
        slow = Storage(gcs=Gcs(endpoint=endpoint))
        for place, where, storage in (
            ("slow store", "gs://bucket", slow),
            ("disk", f"file://{folder}", Storage()),
        ):
            write_volume(f"{where}/wide", wide, storage)
            for (number, (name, job)), repeat in product(enumerate(jobs.items()), range(repeats)):
                values = values_of(where, "wide", f"memory{number}-{repeat}", **job["inference"])
                values["output"] |= job["output"]
                values |= {key: job[key] for key in ("model", "roi", "postprocess")}
                values["storage"] = storage.model_dump(mode="json")
                figures = worker_figures(folder, values)
                ratio = round(figures["peak_bytes"] / figures["projected_bytes"], 3)
                row = rows[name].setdefault(place, {"measured / projected": [], "peak_bytes": []})
                row["measured / projected"].append(ratio)
                row["peak_bytes"].append(figures["peak_bytes"])
                print(place, name, ratio, figures, flush=True)
                yield rows


def killed(folder: Path, runs: int) -> Iterator[dict[str, Any]]:
    """A job that is killed at random moments and started again, until it is complete."""
    random = np.random.default_rng(0)
    keys = {"engine": "torch", "threads": 1, "patch_overlap": [4, 24, 24]}

    def launch(output: str) -> subprocess.Popen[bytes]:
        path = folder / f"{output}.yaml"
        path.write_text(yaml.safe_dump(values_of(f"file://{folder}", "corner", output, **keys)))
        command = [sys.executable, "-W", "ignore", "-m", "beam_inference", "run", str(path)]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    parts = []
    for number in range(3):  # the first of them reads its libraries from the disk
        begun = time.time()
        assert launch(f"undisturbed{number}").wait() == 0
        ended = time.time()
        first, last, each = work_of(f"file://{folder}/undisturbed{number}")
        parts.append((first - begun, last - first, ended - last))
    startup, working, end = map(median, zip(*parts, strict=True))
    between = (startup + working + end) / 2
    work = Workload(
        len(each), working / len(each), stdev(each) / mean(each), 1, startup, 3600 / between
    )
    real = []
    for number in range(runs):
        begun = time.monotonic()
        while True:
            process = launch(f"killed{number}")
            lives = float(random.exponential(between))
            try:
                assert process.wait(lives) == 0
                break
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        real.append(time.monotonic() - begun)
        print("killed", number, round(real[-1], 1), flush=True)
    foretold = mean(run.seconds for run in simulate_many(work)) + end
    yield {
        "foretold / real": round(foretold / mean(real), 3),
        "foretold_seconds": round(foretold, 1),
        "real_seconds": [round(r, 1) for r in real],
        "startup_seconds": round(startup, 1),
        "working_seconds": round(working, 1),
        "end_seconds": round(end, 1),
        "seconds_between_kills": round(between, 1),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="fib25_medulla_train2_image.npy")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory-repeats", type=int, default=3, help="runs of each job in each place"
    )
    parser.add_argument(
        "--memory-jobs",
        nargs="+",
        metavar="NAME",
        help="those with this in their names; others stay",
    )
    parser.add_argument("--kills", type=int, default=10, help="jobs that are killed")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=("memory", "seconds", "killed"),
        help="these anew; others stay",
    )
    known = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if known.parts and RESULTS.exists() else {}
    some = known.memory_jobs or [""]
    jobs = {name: job for name, job in memory_jobs().items() if any(part in name for part in some)}
    others = results.get("memory", {}) if known.memory_jobs else {}
    results["machine"] = machine("torch", "openvino", "onnxruntime")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = np.load(known.data)
        z, y, x = CORNER
        write_volume(f"file://{folder}/whole", whole)
        write_volume(f"file://{folder}/corner", whole[:z, :y, :x])
        parts: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
            "memory": lambda: memory(folder, widened(whole), known.memory_repeats, jobs, others),
            "seconds": lambda: seconds(folder, known.repeats),
            "killed": lambda: killed(folder, known.kills),
        }
        for part in known.parts or parts:
            for taken in parts[part]():
                results[part] = taken
                # what was measured stays if it is stopped
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
