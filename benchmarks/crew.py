"""Several launches of one job at a time: who does what, how often, and how long it takes.

    python -m benchmarks.crew [--chunks 400] [--seconds 0.5]

A network that only waits runs over one patch per chunk. One launch of one worker does a job alone;
then three do the same, two on the local runner and one on a Dask worker: undisturbed, and with one
of them killed in the midst. Last come 2,000 quick chunks. Written to
``benchmarks/results/crew.json``: seconds from the first receipt to the last one, and how many
chunks were done more than once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from beam_inference.config.formats import OutputSpec
from beam_inference.config.json_text import parse_json
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine

RESULTS = Path(__file__).parent / "results" / "crew.json"
NOT_VOXELS = {"info", "provenance"}
"""Files of a volume that name it, and differ from those of another one."""
EDGE = 8
QUICK_CHUNKS = 2000
PATIENCE = 10.0
NETWORK = """
import os, time
import torch

class Quick(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch):
        return self.factor * batch * torch.linspace(1, 2, batch[0].numel()).reshape(batch.shape[1:])

class Slow(Quick):
    def forward(self, batch):
        time.sleep(float(os.environ["CREW_SECONDS"]))
        return super().forward(batch)
"""
RUN = [sys.executable, "-m", "beam_inference", "run"]
LOCAL = ["--direct_running_mode=multi_threading", "--direct_num_workers=1"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, default=400)
    parser.add_argument("--seconds", type=float, default=0.5)
    known = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="crew"))
    try:
        figures = measure(folder, known.chunks, known.seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures, indent=1))


def measure(folder: Path, chunks: int, seconds: float) -> dict[str, Any]:
    """Run the scenarios one after the other."""
    (folder / "network.py").write_text(NETWORK)
    torch.save({"factor": torch.ones(())}, folder / "network.pt")
    with DaskCluster(folder, seconds) as cluster:
        crew = [LOCAL, LOCAL, cluster.flags]
        load = round(os.getloadavg()[0], 1)
        alone = Scenario(folder / "alone", chunks, seconds).run([LOCAL])
        together = Scenario(folder / "together", chunks, seconds).run(crew)
        killed = Scenario(folder / "killed", chunks, seconds).run(crew, kills=1)
        quick = Scenario(folder / "quick", QUICK_CHUNKS, 0.0).run(crew)
    for other in (together, killed):
        other["same_bytes"] = other.pop("sha256") == alone["sha256"]
        other["seconds_over_alone"] = round(other["seconds"] / alone["seconds"], 3)
    return {
        "machine": machine(),
        "load_before": load,
        "seconds_per_chunk": seconds,
        "alone": alone,
        "three": together,
        "three_one_killed": killed,
        "three_quick_chunks": quick,
    }


class DaskCluster:
    """A scheduler and one worker with one thread, as processes."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        self._file = folder / "scheduler.json"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> DaskCluster:
        here = str(Path(__file__).parents[1])
        environment = {**os.environ, "CREW_SECONDS": str(self._seconds), "PYTHONPATH": here}
        for words in (
            ["scheduler", "--port=0", "--no-dashboard", "--scheduler-file"],
            ["worker", "--nthreads=1", "--nworkers=1", "--no-dashboard", "--scheduler-file"],
        ):
            command = [str(Path(sys.executable).with_name("dask")), *words]
            self._processes.append(
                subprocess.Popen(
                    [*command, str(self._file)],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                    env=environment,
                )
            )
            time.sleep(5)
        return self

    @property
    def flags(self) -> list[str]:
        """Flags of a launch on the cluster."""
        return ["--runner=DaskRunner", f"--dask_scheduler_file={self._file}"]

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@dataclass(frozen=True)
class Scenario:
    """A job, in a folder of its own, that several launches do together."""

    folder: Path
    chunks: int
    seconds: float

    def run(self, crew: Sequence[Sequence[str]], *, kills: int = 0) -> dict[str, Any]:
        """Let launches begin at once, kill some when a third is done, and look at what is there."""
        self._write()
        processes = [self._start(flags) for flags in crew]
        killed = 0
        while any(process.poll() is None for process in processes):
            time.sleep(0.2)
            if killed < kills and len(self._receipts()) > self.chunks // 3:
                processes[killed].kill()
                killed += 1
        codes = [process.wait() for process in processes]
        logs = [path.read_text()[-500:] for path in sorted(self.folder.glob("*.log"))]
        assert codes == [-signal.SIGKILL] * kills + [0] * (len(crew) - kills), (codes, logs)
        return self._figures()

    def _figures(self) -> dict[str, Any]:
        times = [path.stat().st_mtime for path in self._receipts()]
        assert len(times) == self.chunks
        state = self.folder / "out" / "_beam_inference"
        done = [
            parse_json(path.read_bytes())["done"] for path in (state / "launches").glob("*.json")
        ]
        receipts = [parse_json(path.read_bytes()) for path in self._receipts()]
        ended = {path.stem for path in (state / "launches").glob("*.json")}
        of_killed = sum(receipt["launch"] not in ended for receipt in receipts)
        digest = hashlib.sha256()
        for path in sorted((self.folder / "out").rglob("*")):
            if (
                path.is_file()
                and "_beam_inference" not in path.parts
                and path.name not in NOT_VOXELS
            ):
                digest.update(path.read_bytes())
        return {
            "chunks": self.chunks,
            "seconds": round(max(times) - min(times), 1),
            "done_by_launch": sorted(done),
            "done_by_killed": of_killed,
            "done_more_than_once": sum(done) + of_killed - self.chunks,
            "sha256": digest.hexdigest(),
        }

    def _receipts(self) -> list[Path]:
        return [*(self.folder / "out" / "_beam_inference" / "receipts").rglob("*.json")]

    def _start(self, flags: Sequence[str]) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{len([*self.folder.glob('*.log')])}.log").open("wb")
        with log:
            return subprocess.Popen(
                [*RUN, str(self.folder / "job.yaml"), *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "CREW_SECONDS": str(self.seconds)},
            )

    def _write(self) -> None:
        self.folder.mkdir()
        shape = (4 * EDGE, 10 * EDGE, self.chunks // 40 * EDGE)
        box = BoundingBox((0, 0, 0), shape)
        spec = OutputSpec(
            url=f"file://{self.folder}/in",
            format="precomputed",
            dtype="uint8",
            channels=1,
            bounds=box,
            block_shape=(32, 32, 32),
            voxel_size_nm=(10.0, 10.0, 10.0),
        )
        values = np.random.default_rng(0).integers(0, 256, (1, *shape), dtype=np.uint8)
        create_output(spec).write(box, values)
        edges = [EDGE] * 3
        inference = {"patch_shape": edges, "patch_overlap": [0] * 3, "chunk_shape": edges}
        settled = {"device": "cpu", "engine": "torch", "batch_size": 1, "threads": 1}
        network = f"../network.py:{'Slow' if self.seconds else 'Quick'}"
        job = {
            "input": {"path": "in"},
            "output": {"path": "out", "block_shape": edges},
            "model": {"path": network, "weights": "../network.pt", "prediction_bound": 512},
            "inference": inference | settled,
            "job": {"timeouts": {"claim": PATIENCE}},
        }
        (self.folder / "job.yaml").write_text(yaml.safe_dump(job))


if __name__ == "__main__":
    main()
