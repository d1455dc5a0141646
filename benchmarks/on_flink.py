"""The same jobs on two Flink workers and on two local processes, in turn: seconds and memory.

    FLINK_JOB_SERVER_JAR=job-server.jar make bench-flink

The job server runs all the time, with a heap of 1 GB, as do the JobManager and two TaskManagers of
one slot: four JVMs on the machine's cores, beside two workers. Written to
``benchmarks/results/on_flink.json``, for real work, for the same with Flink's blocking exchanges
(``--execution_mode_for_batch=BATCH``) and for quick chunks: medians of the ratios of turns, from
the first chunk's start to the last one's end; how much later than locally the first chunk begins;
and the resident memory of launch and workers, in the last quarter of that time over the first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch
import yaml
from clusters.flink import flink_on_hosts

from benchmarks.bench import small_unet, write_voxels
from benchmarks.load import resident
from benchmarks.measure import machine, ratio_of_pairs, work_of

RESULTS = Path(__file__).parent / "results" / "on_flink.json"
NETWORKS = Path(__file__).with_name("bench.py")
RUN = [sys.executable, "-m", "beam_inference", "run"]
LOCAL = ["--direct_running_mode=multi_processing", "--direct_num_workers=2"]
BATCH = ["--execution_mode_for_batch=BATCH"]
CHUNK = (32, 128, 128)
PATCH = (16, 64, 64)
CHUNKS = (6, 8, 9)
"""Real work, along z, y and x: 432 chunks of eight patches of a U-Net."""
QUICK_EDGE = 4
QUICK_CHUNKS = (28, 27, 27)
"""20,412 chunks of nothing but reading and writing."""
WORKERS = (b"sdk_worker_main", b"SdkHarness")
"""What their command lines hold: of local ones, and of those that a worker pool starts."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", type=Path, required=True, help="apache-flink-libraries")
    parser.add_argument("--repeats", type=int, default=3)
    known = parser.parse_args()
    if "FLINK_JOB_SERVER_JAR" not in os.environ:
        parser.error("FLINK_JOB_SERVER_JAR names no job server")
    pyflink = next(known.environment.resolve().glob("lib/python*/site-packages/pyflink"))
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        work, quick = write_work(folder), write_quick(folder)
        with flink_on_hosts(pyflink, folder) as flink:
            endpoint = flink.start_job_server(os.environ["FLINK_JOB_SERVER_JAR"])
            flags = [*flink.flags, f"--job_endpoint={endpoint}", "--parallelism=2"]
            figures = {
                "machine": machine("apache-beam", "torch", "tensorstore"),
                "load_before": load,
                "hosts": len(flink.hosts),
                "work": compare(work, {"flink": flags, "batch": [*flags, *BATCH]}, known.repeats),
                "quick": compare(quick, {"flink": flags}, known.repeats),
            }
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def compare(job: Path, ways: dict[str, Sequence[str]], repeats: int) -> dict[str, dict[str, Any]]:
    """Do a job locally and in other ways, in turn.

    Args:
        job: a job file.
        ways: flags of the other ways.
        repeats: of each.

    Returns:
        For each way: the rate as a part of the local one, and what goes with it.
    """
    turns = [
        {"local": do(job, LOCAL)} | {way: do(job, flags) for way, flags in ways.items()}
        for _ in range(repeats)
    ]
    return {
        way: {
            "chunks": turns[0][way]["chunks"],
            # of rates: the local time over that of the way
            "rate": ratio_of_pairs([(t["local"]["seconds"], t[way]["seconds"]) for t in turns]),
            "first_chunk_later_by": median(
                round(t[way]["until_first"] - t["local"]["until_first"], 1) for t in turns
            ),
            "memory_last_over_first_quarter": {
                who: median(t[way]["memory"][who] for t in turns) for who in ("launch", "workers")
            },
        }
        for way in ways
    }


def do(job: Path, flags: Sequence[str]) -> dict[str, Any]:
    """Do a job in a new output; its seconds, and its memory as it goes on."""
    with tempfile.TemporaryDirectory(dir=job.parent) as output:
        url = Path(output, "out").as_uri()
        begun = time.time()
        with subprocess.Popen(
            [*RUN, str(job), "--set", f"output.path={url}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as run:
            memory = Memory(run)
            watching = threading.Thread(target=memory.watch)
            watching.start()
            told, _ = run.communicate()
            watching.join()
        assert run.returncode == 0, told
        first, last, each = work_of(url)
    return {
        "chunks": len(each),
        "seconds": last - first,
        "until_first": first - begun,
        "memory": memory.growth(first, last),
    }


class Memory:
    """Resident megabytes of a launch and of the workers, as time goes on."""

    def __init__(self, launch: subprocess.Popen[str]) -> None:
        self._launch = launch
        self._seen: list[tuple[float, int, int]] = []

    def watch(self) -> None:
        """Look twice a second, until the launch has ended."""
        while self._launch.poll() is None:
            held = (resident(self._launch.pid), sum(map(resident, _workers())))
            self._seen.append((time.time(), *held))
            time.sleep(0.5)

    def growth(self, first: float, last: float) -> dict[str, float]:
        """What both hold in the last quarter of a time, over what they hold in the first."""
        span = (last - first) / 4
        quarters = [
            [seen for seen in self._seen if begin <= seen[0] <= begin + span]
            for begin in (first, last - span)
        ]
        before, after = ([mean(held) for held in zip(*seen, strict=True)][1:] for seen in quarters)
        return {
            who: round(last / first, 3)
            for who, first, last in zip(("launch", "workers"), before, after, strict=True)
        }


def _workers() -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if any(each in words for each in WORKERS):
            yield int(process.name)


def write_work(folder: Path) -> Path:
    """The job of real work: a volume, a U-Net's weights and the job file."""
    torch.save(small_unet().state_dict(), folder / "weights.pt")
    network = {"path": f"{NETWORKS}:small_unet", "weights": str(folder / "weights.pt")}
    more = {"output_channels": 3, "activation": "sigmoid", "normalize": "unit"}
    return _write(folder / "work", PATCH, CHUNK, CHUNKS, network | more, [0, 1])


def write_quick(folder: Path) -> Path:
    """The job of quick chunks."""
    chunk = (QUICK_EDGE,) * 3
    return _write(folder / "quick", chunk, chunk, QUICK_CHUNKS, {"path": "identity"}, [0, 255])


def _write(
    folder: Path,
    patch: tuple[int, int, int],
    chunk: tuple[int, int, int],
    counts: tuple[int, int, int],
    model: dict[str, Any],
    value_range: list[int],
) -> Path:
    folder.mkdir()
    shape = [size * count for size, count in zip(chunk, counts, strict=True)]
    values = np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)
    write_voxels(folder / "in", values)
    settled = {"device": "cpu", "engine": "torch", "batch_size": 1, "threads": 1}
    job = {
        "input": {"path": "in"},
        "output": {
            "path": "out",
            "dtype": "uint8",
            "block_shape": list(chunk),
            "value_range": value_range,
        },
        "model": model,
        "inference": {"patch_shape": list(patch), "chunk_shape": list(chunk), **settled},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


if __name__ == "__main__":
    main()
