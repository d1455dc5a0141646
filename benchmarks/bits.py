"""Count the results of one job that is cut, ordered, split, killed and resumed in many ways.

``python -m benchmarks.bits`` runs the FIB-25 network of the tests (from ``../shared/data``) over a
part of its volume: with a sigmoid, with a softmax and with logits; by six chunk shapes and both
strategies; and with launches that are killed, do a sample first, and change the strategy. There is
to be one hash for each network. Writes ``benchmarks/results/bits.json``.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from beam_inference.config.formats import OutputSpec
from beam_inference.geometry.bounding_box import BoundingBox
from beam_inference.volumes.opening import open_volume
from beam_inference.volumes.outputs import create_output
from benchmarks.measure import machine, take_no_arguments

NETWORKS = Path(__file__).parents[1] / "tests" / "networks"
VOLUME = Path(__file__).parents[2] / "shared" / "data" / "fib25_medulla_train2_image.npy"
SHAPE = (48, 96, 96)
CHUNKS = (
    (48, 96, 96),
    (16, 32, 32),
    (16, 96, 32),
    (32, 32, 64),
    (48, 32, 96),
    (16, 64, 96),
)
STRATEGIES = ("exchange", "recompute")
ACTIVATIONS = ("sigmoid", "softmax", "none")
DISTURBED = 3
RESULTS = Path(__file__).parent / "results" / "bits.json"
_COMMAND = [sys.executable, "-W", "ignore", "-m", "beam_inference"]


def write_job(
    folder: Path, name: str, activation: str, chunk: tuple[int, ...], strategy: str
) -> Path:
    """Write a job file over the volume ``in`` of a folder."""
    values: dict[str, Any] = {
        "input": {"path": "in"},
        "output": {"path": name, "dtype": "float32", "block_shape": [16, 32, 32]},
        "model": {
            "path": f"{NETWORKS / 'fib25.py'}:fib25_network",
            "weights": str(NETWORKS / "fib25.safetensors"),
            "output_channels": 3,
            "activation": activation,
            "normalize": "unit",
        },
        "inference": {
            "patch_shape": [20, 48, 48],
            "patch_overlap": [4, 16, 16],
            "chunk_shape": list(chunk),
            "strategy": strategy,
            "batch_size": 2,
            "device": "cpu",
            "engine": "torch",
            "threads": 1,
        },
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(values))
    return path


def run(job: Path, *words: str, seconds: float | None = None) -> int:
    """Run a job to its end, or kill it after some seconds; return its exit code."""
    process = subprocess.Popen(
        [*_COMMAND, "run", str(job), *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    if seconds is not None:
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    return process.wait()


def run_disturbed(job: Path, chance: random.Random) -> None:
    """Do a sample, then kill launches of changing strategy, then finish by one of them."""

    def strategy() -> list[str]:
        return ["--set", f"inference.strategy={chance.choice(STRATEGIES)}"]

    assert run(job, *strategy(), "--sample", "0.2", "--seed", str(chance.randrange(100))) == 0
    for _ in range(2):
        run(job, *strategy(), seconds=chance.uniform(4, 9))
    assert run(job, *strategy()) == 0


def hash_of(folder: Path, name: str) -> str:
    """Hash of an output's voxels."""
    volume = open_volume(f"file://{folder / name}")
    return hashlib.sha256(volume.read(volume.bounds).tobytes()).hexdigest()


def measure(folder: Path, activation: str) -> dict[str, Any]:
    """Run all jobs of one network; the number of each hash."""
    hashes: dict[str, list[str]] = {}
    for number, (chunk, strategy) in enumerate(product(CHUNKS, STRATEGIES)):
        name = f"{activation}-{number}"
        assert run(write_job(folder, name, activation, chunk, strategy)) == 0
        hashes.setdefault(hash_of(folder, name), []).append(f"{chunk}, {strategy}")
    for seed in range(DISTURBED):
        name = f"{activation}-disturbed-{seed}"
        run_disturbed(write_job(folder, name, activation, CHUNKS[1], "auto"), random.Random(seed))
        hashes.setdefault(hash_of(folder, name), []).append(f"disturbed, seed {seed}")
    return {
        "jobs": sum(map(len, hashes.values())),
        "hashes": {digest[:16]: len(jobs) for digest, jobs in hashes.items()},
    }


def main() -> None:
    """Run everything, and write the result."""
    take_no_arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        box = BoundingBox((0, 0, 0), SHAPE)
        array = np.load(VOLUME)[box.slices_in(box)]
        spec = OutputSpec(
            f"file://{folder}/in", "precomputed", "uint8", 1, box, (16, 32, 32), (10.0, 10.0, 10.0)
        )
        create_output(spec).write(box, array[None])
        found = {activation: measure(folder, activation) for activation in ACTIVATIONS}
    print(json.dumps(found, indent=1))
    RESULTS.write_text(json.dumps({"machine": machine(), "networks": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
