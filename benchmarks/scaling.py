"""Measure how the rate of a job grows with its workers, on a store that answers late.

    python -m benchmarks.scaling [--modes threads local dask] [--most 64] [--seconds 2]

The network sleeps, so that the cores are left to what surrounds it: reads, writes, claims and
receipts, all against a stand-in for Cloud Storage on this machine that waits before each answer.

- ``threads``: workers as threads of one process, each with a job opened for itself, as launches of
  their own would; they take the runs that a runner would give them.
- ``local``: processes of Beam's local runner, ``--direct_running_mode=multi_processing``.
- ``dask``: processes of a Dask cluster with one thread each.

The stand-in for Dataflow executes a job in one process, so it has nothing to say here. The rate is
that of the time in which every worker is at work: from the first call of the last one that begins
to the last call of the first one that runs out. Written to ``benchmarks/results/scaling.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from beam_inference.beam.transforms import launch_ranges, run_length, runs_of_range
from beam_inference.config.formats import OutputSpec
from beam_inference.config.job import JobConfig
from beam_inference.config.job_file import parse_job
from beam_inference.config.storage import Gcs, Storage
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.job.messages import Launch
from beam_inference.job.state import State
from beam_inference.launch.prepare import prepare
from beam_inference.launch.run_job import run_job
from beam_inference.volumes.outputs import create_output
from beam_inference.worker.worker import Worker
from benchmarks.latency import server
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results" / "scaling.json"
LATENCY_SECONDS = 0.1
CHUNK = (16, 64, 64)
MOST = {"threads": 64, "local": 16, "dask": 16}
CHUNKS_EACH = {"threads": 16, "local": 40, "dask": 40}
"""Chunks for each worker: processes need time to start, while others work already."""
_SECONDS = "SCALING_SECONDS"
_CALLS = "SCALING_CALLS"


def sleeping() -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
    """Make a network that sleeps, notes when, and gives back what it is given."""
    seconds = float(os.environ[_SECONDS])
    owner = f"{os.getpid()}-{uuid.uuid4().hex}"  # a worker calls its network from several threads

    def sleep(batch: NDArray[np.float32]) -> NDArray[np.float32]:
        start = time.time()
        time.sleep(seconds)
        line = f"{owner} {start} {time.time()}\n"
        file = os.open(os.environ[_CALLS], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, line.encode())
        os.close(file)
        return batch

    return sleep


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--most", type=int, default=64, help="workers, at most")
    parser.add_argument("--seconds", type=float, default=2.0, help="that a chunk is computed")
    known = parser.parse_args()
    figures = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    figures |= {
        "machine": machine("apache-beam", "dask", "tensorstore"),
        "latency_seconds": LATENCY_SECONDS,
        "seconds_per_chunk": known.seconds,
    }
    for mode in known.modes:
        rows: list[dict[str, Any]] = []
        for workers in (1, 2, 4, 8, 16, 32, 64):
            if workers <= min(known.most, MOST[mode]):
                row = measure(mode, workers, known.seconds)
                row["over_ideal"] = round(row["busy"] / (rows or [row])[0]["busy"], 3)
                print(mode, row, flush=True)
                rows.append(row)
        figures[mode] = rows
        RESULTS.write_text(json.dumps(figures, indent=1) + "\n")


def measure(mode: str, workers: int, seconds: float) -> dict[str, Any]:
    """Do a job with so many workers; what share of their time the network was at work."""
    chunks = CHUNKS_EACH[mode] * workers
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls"
        os.environ |= {_SECONDS: str(seconds), _CALLS: str(calls)}
        before = _processor_seconds()
        load = os.getloadavg()[0]
        with server(LATENCY_SECONDS) as url:
            config = _write_job(url, chunks, Path(folder))
            MODES[mode](config, workers)
            count = _count_receipts(config)
            assert count == chunks, (count, chunks)
        used = [after - each for after, each in zip(_processor_seconds(), before, strict=True)]
        launcher = None if mode == "threads" else os.getpid()
        busy = _busy_share(_read_calls(calls, launcher), workers, seconds)
    own, children = (round(1000 * each / chunks, 1) for each in used)
    return {
        "workers": workers,
        "chunks": chunks,
        "busy": round(busy, 4),
        "processor_ms_per_chunk": {"here": own, "store and processes": children},
        "load_before": round(load, 1),
    }


def _write_job(url: str, chunks: int, folder: Path) -> JobConfig:
    storage = Storage(gcs=Gcs(endpoint=url))
    box = BoundingBox((0, 0, 0), (CHUNK[0] * chunks, *CHUNK[1:]))
    spec = OutputSpec(
        "gs://bucket/in", "precomputed", "uint8", 1, box, CHUNK, (8.0, 8.0, 8.0), storage
    )
    values = np.random.default_rng(0).integers(0, 256, (1, *box.shape), dtype=np.uint8)
    create_output(spec).write(box, values)
    shape = list(CHUNK)
    job = {
        "input": {"path": spec.url},
        "output": {
            "path": "gs://bucket/out",
            "dtype": "uint8",
            "block_shape": shape,
            "value_range": [0, 1],
        },
        "model": {"path": f"{__file__}:sleeping", "normalize": "unit", "prediction_bound": 1},
        "inference": {
            "patch_shape": shape,
            "chunk_shape": shape,
            "device": "cpu",
            "engine": "numpy",
            "batch_size": 1,
            "strategy": "recompute",
        },
        "storage": {"gcs": {"endpoint": url}},
    }
    return parse_job(job, folder)


def _count_receipts(config: JobConfig) -> int:
    state = State("gs://bucket/out/_beam_inference", config.storage)
    job = state.load_job()
    assert job is not None
    return sum(1 for _ in state.of(job).receipt_indices(0, job.plan.chunks.count))


def _in_threads(config: JobConfig, workers: int) -> None:
    launch = prepare(config, workers=workers, claims=True)
    Path(os.environ[_CALLS]).unlink(missing_ok=True)  # of the trial
    runs: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()
    for run in _runs(launch, workers):
        runs.put(run)
    faults: list[BaseException] = []

    def work() -> None:
        try:
            worker = Worker(launch)
            while True:
                for _ in worker.infer_chunks(runs.get_nowait()):
                    pass
        except queue.Empty:
            pass
        except BaseException as error:  # told below, in the main thread
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


def _runs(launch: Launch, workers: int) -> Iterator[tuple[int, ...]]:
    length = run_length(launch, workers)
    for each in launch_ranges(launch, workers):
        yield from runs_of_range(each, launch, length)


def _in_local_processes(config: JobConfig, workers: int) -> None:
    flags = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}"]
    _run(config, flags)


def _on_dask(config: JobConfig, workers: int) -> None:
    with _dask_cluster(workers) as file:
        flags = ["--runner=DaskRunner", f"--dask_scheduler_file={file}"]
        _run(config, flags)


def _run(config: JobConfig, flags: Sequence[str]) -> None:
    outcome = run_job(config, flags)
    assert outcome.exit_code == 0, outcome


@contextmanager
def _dask_cluster(workers: int) -> Iterator[Path]:
    """A scheduler and workers as processes, as docs/dask.md starts them; the scheduler's file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cluster.json"
        dask = [sys.executable, "-m", "dask"]
        common = ["--scheduler-file", str(file), "--no-dashboard"]
        flags = ["--nworkers", str(workers), "--nthreads", "1", "--local-directory", folder]
        commands = (
            [*dask, "scheduler", *common, "--port", "0", "--host", "127.0.0.1"],
            [*dask, "worker", *common, *flags],
        )
        started = [
            subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            for command in commands
        ]
        try:
            yield file
        finally:
            for process in reversed(started):
                process.terminate()
                process.wait()


MODES: dict[str, Callable[[JobConfig, int], None]] = {
    "threads": _in_threads,
    "local": _in_local_processes,
    "dask": _on_dask,
}


@dataclass(frozen=True)
class Call:
    """One call of the network: times in seconds."""

    start: float
    stop: float


def _read_calls(path: Path, launcher: int | None) -> dict[str, list[Call]]:
    """The calls of each worker, by its network; or by its process, without a launcher's."""
    calls = defaultdict(list)
    for line in path.read_text().splitlines():
        owner, start, stop = line.split()
        process = owner.partition("-")[0]
        if process != str(launcher):
            calls[owner if launcher is None else process].append(Call(float(start), float(stop)))
    return calls


def _busy_share(calls: dict[str, list[Call]], workers: int, seconds: float) -> float:
    """The share of time that the network was at work, of all workers, while all were."""
    assert len(calls) == workers, f"{len(calls)} of {workers} workers had something to do"
    first = max(min(call.start for call in made) for made in calls.values())
    last = min(max(call.stop for call in made) for made in calls.values())
    assert last - first >= seconds, "some had nothing left to do before all had begun"
    inside = sum(
        max(0.0, min(call.stop, last) - max(call.start, first)) / (call.stop - call.start)
        for made in calls.values()
        for call in made
    )
    return inside * seconds / (workers * (last - first))


def _processor_seconds() -> tuple[float, float]:
    """Seconds of processors that this process took, and children of it that have ended."""
    own, children = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


if __name__ == "__main__":
    main()
