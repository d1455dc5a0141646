"""What the job adds to the bare network, and what each part of it costs: ``make bench``.

Each row is a ratio from runs taken in turn, A B A B, so that a machine whose speed drifts does not
matter. Writes ``benchmarks/results/job.json``. The network is the residual U-Net with random
weights, its patches 16×96×96 at an overlap of a quarter.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from beam_inference.config.formats import OutputSpec
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.engines.loading import load_predictor
from beam_inference.engines.predictor import Predictor
from beam_inference.engines.protocol import Encoding
from beam_inference.geometry import zyx
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.records import Part, Receipt
from beam_inference.job.state import State
from beam_inference.launch.planned_job import plan_job
from beam_inference.launch.prepare import prepare
from beam_inference.operators.normalize import unit
from beam_inference.residual_unet import ResidualUNet
from beam_inference.volumes.outputs import create_output
from beam_inference.worker.chunk_inference import ChunkInference
from benchmarks.latency import LATENCY_SECONDS, idle_share
from benchmarks.measure import machine, ratio, ratio_of_pairs, work_of
from benchmarks.page import PAGE, page

PATCH = (16, 96, 96)
OVERLAP = (4, 24, 24)
SHAPE = (28, 168, 168)
CORES = len(os.sched_getaffinity(0))
RESULTS = Path(__file__).parent / "results" / "job.json"
UINT8 = Encoding(np.dtype("uint8"), (0.0, 1.0))


def unet() -> torch.nn.Module:
    """A network of the paper's kind, the same at every call."""
    torch.manual_seed(0)
    return ResidualUNet(output_channels=3)


def small_unet() -> torch.nn.Module:
    """One that takes as long for a chunk on a core as a large one on a GPU: a second or two."""
    torch.manual_seed(0)
    return ResidualUNet(output_channels=3, widths=(4, 8))


def write_input(folder: Path, shape: tuple[int, int, int]) -> None:
    """A volume of random uint8 voxels, ``in``."""
    write_voxels(
        folder / "in", np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)
    )


def write_voxels(path: Path, voxels: NDArray[Any]) -> None:
    """A volume of some voxels (channels, z, y, x)."""
    box = BoundingBox((0, 0, 0), zyx.triple(voxels.shape[1:]))
    spec = OutputSpec(
        f"file://{path}",
        "precomputed",
        voxels.dtype.name,
        len(voxels),
        box,
        (64, 64, 64),
        (8.0, 8.0, 8.0),
    )
    create_output(spec).write(box, voxels)


def job(
    folder: Path,
    engine: str,
    threads: int = CORES,
    output: str = "out",
    network: str = "unet",
) -> JobConfig:
    """A job over that volume."""
    values = {
        "input": {"path": str(folder / "in")},
        "output": {"path": str(folder / output), "dtype": "uint8", "block_shape": [28, 56, 56]},
        "model": {
            "path": f"{__file__}:{network}",
            "output_channels": 3,
            "activation": "sigmoid",
            "normalize": "unit",
        },
        "inference": {
            "patch_shape": list(PATCH),
            "patch_overlap": list(OVERLAP),
            "chunk_shape": list(SHAPE),
            "device": "cpu",
            "engine": engine,
            "threads": threads,
        },
    }
    return parse_job(values, folder)


@contextmanager
def volume(shape: tuple[int, int, int] = SHAPE) -> Iterator[Path]:
    """A temporary folder with an input."""
    with tempfile.TemporaryDirectory() as name:
        write_input(Path(name), shape)
        yield Path(name)


def predictor_of(engine: str, threads: int = CORES, network: str = "unet") -> Predictor:
    config = job(Path("/nowhere"), engine, threads, network=network)
    return load_predictor(config.model, config.inference)


def forward(predictor: Predictor, calls: int) -> Callable[[], None]:
    """So many calls of the bare network, by its engine."""
    batch = np.random.default_rng(0).random((1, 1, *PATCH), np.float32)

    def run() -> None:
        with predictor.device.session():
            uploaded = predictor.device.upload(batch)
            for _ in range(calls):
                predictor.predict(uploaded)

    return run


def eager(network: torch.nn.Module, calls: int) -> Callable[[], None]:
    """So many calls of a network by PyTorch itself."""
    network = network.eval()
    batch = torch.rand((1, 1, *PATCH), generator=torch.Generator().manual_seed(0))

    def run() -> None:
        torch.set_num_threads(CORES)
        with torch.inference_mode():
            for _ in range(calls):
                network(batch).sigmoid()

    return run


def engines(names: Sequence[str], repeats: int) -> dict[str, Any]:
    """Compare engines' forward pass with PyTorch's eager mode, on the same cores."""
    plain = eager(unet(), 4)
    found = {
        f"{name} / eager": ratio(forward(predictor_of(name), 4), plain, repeats) for name in names
    }
    small = forward(predictor_of("torch", network="small_unet"), 20)
    return found | {"torch / eager, widths 4 and 8": ratio(small, eager(small_unet(), 20), repeats)}


def loop_against_forward(repeats: int, engine: str) -> dict[str, float]:
    """One chunk, from the uint8 cutout to the uint8 core, against the same forward passes alone."""
    with volume() as folder:
        work = plan_job(job(folder, engine)).plan.work(0)
    predictor = predictor_of(engine)
    cutout = np.random.default_rng(0).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
    normalize = unit(cutout.dtype)

    def infer() -> None:
        inference = ChunkInference(predictor, normalize, 3, 1, 1.0)
        inference.infer(inference.start_upload(cutout, work.input_box), work, UINT8)

    return ratio(
        infer,
        forward(predictor, work.patch_count),
        repeats,
    )


def job_against_forward(repeats: int, engine: str) -> dict[str, Any]:
    """A whole job, by the command, against the bare forward of its patches.

    Without start-up it is from when its first chunk is begun until the command ends.
    """
    with volume((56, 336, 336)) as folder:
        config = job(folder, engine)
        predictor = predictor_of(engine)
        whole = []
        working = []
        for repeat in range(repeats + 1):
            values = config.model_dump(mode="json") | {
                "output": config.output.model_dump() | {"path": f"out{repeat}"}
            }
            (folder / "job.yaml").write_text(json.dumps(values))
            launched = time.time()
            subprocess.run(
                [*_COMMAND, "run", folder / "job.yaml"], check=True, stderr=subprocess.DEVNULL
            )
            ended = time.time()
            output = f"file://{folder}/out{repeat}"
            first, *_ = work_of(output)
            resolved = State(f"{output}/_beam_inference").load_job()
            assert resolved is not None
            plan = resolved.plan  # with the strategy that was chosen for it
            bare = forward(predictor, plan.totals.patch_count)
            start = time.perf_counter()
            bare()
            if repeat:
                seconds = time.perf_counter() - start
                whole.append((ended - launched, seconds))
                working.append((ended - first, seconds))
    return ratio_of_pairs(working) | {
        "from start to exit": ratio_of_pairs(whole),
        "patches": plan.totals.patch_count,
        "chunks": plan.chunks.count,
    }


_COMMAND = [sys.executable, "-W", "ignore", "-m", "beam_inference"]
_FORWARD = """
import sys, time
from benchmarks import bench
engine, threads, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
run = bench.forward(bench.predictor_of(engine, threads), calls)
run()
print("ready", flush=True)
sys.stdin.readline()
start = time.perf_counter()
run()
print(time.perf_counter() - start)
"""


def _in_processes(count: int, *arguments: str) -> float:
    """Seconds of forward passes in each of so many processes at once; the longest."""
    command = [sys.executable, "-W", "ignore", "-c", _FORWARD, *arguments]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return max(float(process.communicate()[0]) for process in started)


def processes(repeats: int) -> dict[str, Any]:
    """Compare two processes of one thread with one alone, and with one of two threads.

    The network is run by OpenVINO.
    """
    rounds = []
    for _ in range(repeats):
        alone, two = (_in_processes(count, "openvino", "1", "8") for count in (1, 2))
        rounds.append((two, alone, _in_processes(1, "openvino", "2", "16")))
    return ratio_of_pairs([(two, alone) for two, alone, _ in rounds]) | {
        "one of two threads": ratio_of_pairs([(two, wide) for two, _, wide in rounds])
    }


_WORKER = """
import json, sys, time
from beam_inference.environment import use_one_heap
use_one_heap()  # as the command line does, before there are threads
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from beam_inference.config.job_file import parse_job
from beam_inference.launch.prepare import prepare
from beam_inference.job.place import Place
from beam_inference.launch.planned_job import NetworkNeeds, plan_job
from beam_inference.worker.worker import Worker
from benchmarks.latency import LATENCY_SECONDS, idle_share
from benchmarks.measure import peak_bytes
config = parse_job(json.loads(sys.argv[1]), Path(sys.argv[2]))
# as elsewhere, a worker has not tried the network
with ProcessPoolExecutor(1, get_context("spawn")) as launcher:
    worker = Worker(launcher.submit(prepare, config).result())
inference = worker.job.config.inference
needs = NetworkNeeds.of_engine(
    inference.engine, inference.batch_size, worker.job.working_set_bytes)
projected = plan_job(config).memory(Place(threads_per_process=1), needs).host_bytes
start, chunks = time.perf_counter(), range(worker.job.plan.chunks.count)


def job():
    is_exchange = worker.job.plan.exchange is not None
    stages = [worker.sum_chunks, worker.merge_seams] if is_exchange else [worker.infer_chunks]
    for stage in stages:
        for first in chunks[::100]:  # a run of chunks at a time, as the pipeline does
            for _ in stage(chunks[first : first + 100]):
                pass


peak = peak_bytes(job)
seconds = time.perf_counter() - start
print(json.dumps({"peak_bytes": peak, "projected_bytes": projected, "seconds": seconds}))
"""


def worker_figures(folder: Path, values: dict[str, Any]) -> dict[str, float]:
    """A worker doing a whole job in one thread, in a process of its own."""
    command = [sys.executable, "-c", _WORKER, json.dumps(values), str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    figures: dict[str, float] = json.loads(printed.splitlines()[-1])
    return figures


def memory_against_projection() -> dict[str, float]:
    """Peak memory of one worker, over what it held before, against the projection."""
    with volume((56, 336, 336)) as folder:
        config = job(folder, "torch")
        figures = worker_figures(folder, config.model_dump(mode="json"))
    peak = figures["peak_bytes"]
    projected = figures["projected_bytes"]
    return {
        "ratio": round(peak / projected, 3),
        "measured_bytes": peak,
        "projected_bytes": projected,
    }


def growth(chunk: tuple[int, int, int], patch: tuple[int, int, int], layers: int) -> dict[str, Any]:
    """Measure peak memory and seconds per voxel of a worker in volumes of more and more chunks.

    The first volume is of ``layers`` × 6 × 6 chunks: enough for what a worker keeps from chunk to
    chunk to be full.
    """
    found = {}
    for factor in (1, 2, 3):
        with volume(
            (layers * factor * chunk[0], 6 * factor * chunk[1], 6 * factor * chunk[2])
        ) as folder:
            values = {
                "input": {"path": str(folder / "in")},
                "output": {
                    "path": str(folder / "out"),
                    "dtype": "uint8",
                    "value_range": [0, 255],
                    "block_shape": chunk,
                },
                "model": {"path": "identity"},
                "inference": {
                    "patch_shape": patch,
                    "patch_overlap": [n // 4 for n in patch],
                    "chunk_shape": chunk,
                    "device": "cpu",
                },
            }
            found[f"{factor**3}x"] = worker_figures(folder, values)
    first = found["1x"]
    return {
        name: {
            "memory": round(last["peak_bytes"] / first["peak_bytes"], 3),
            "seconds per voxel": round(last["seconds"] / first["seconds"] / int(name[:-1]), 3),
            "peak / projection": round(last["peak_bytes"] / last["projected_bytes"], 3),
            **last,
        }
        for name, last in found.items()
    }


def receipts_per_second(count: int = 2000) -> dict[str, float]:
    """Durable receipts written one after the other to a local folder, and listed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_input(folder, SHAPE)
        resolved = prepare(job(folder, "torch")).read_job()
        state = State(f"file://{name}/state").of(resolved)
        part = Part.of(BoundingBox((0, 0, 0), (1, 1, 1)), np.zeros((1, 1, 1, 1), np.uint8))
        start = time.perf_counter()
        for chunk in range(count):
            state.write_receipt(
                Receipt.model_validate(
                    {
                        "chunk": chunk,
                        "parts": [part],
                        "batch_size": 1,
                        "uniform_patches": 0,
                        "seconds": {"read": 0.1, "infer": 0.1, "write": 0.1},
                        "attempts": {"read": 1, "infer": 1, "write": 1},
                        "finished_at": datetime.now(UTC),
                        "worker": "bench:0",
                        "launch": "bench",
                        "fingerprint": resolved.fingerprint,
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", default="openvino,onnxruntime,torch,compile")
    parser.add_argument("--rows", nargs="+", help="these anew; others stay")
    args = parser.parse_args()
    repeats = args.repeats
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if args.rows and RESULTS.exists() else {}
    )
    results["machine"] = machine("torch", "openvino", "onnxruntime")
    rows: dict[str, Callable[[], Any]] = {
        "idle": lambda: idle_share(LATENCY_SECONDS, f"{__file__}:small_unet", "openvino"),
        "engines": lambda: engines(args.engines.split(","), repeats),
        "loop / forward": lambda: loop_against_forward(repeats, "openvino"),
        "job / forward": lambda: job_against_forward(repeats, "openvino"),
        "two processes / one": lambda: processes(repeats),
        "growth": lambda: growth((64, 128, 128), (16, 64, 64), 4),
        "growth, small chunks": lambda: growth((32, 64, 64), (16, 32, 32), 6),
        "growth, tiny chunks": lambda: growth((16, 16, 16), (16, 16, 16), 36),
        "peak memory / projection": memory_against_projection,
        "receipts": receipts_per_second,
    }
    for name in args.rows or rows:
        results[name] = rows[name]()
        print(name, results[name], flush=True)
        # what was measured stays if it is stopped
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page())
    print(page())


if __name__ == "__main__":
    main()
