"""Measure how long commands take to start, over importing the libraries that jobs need.

``python -m benchmarks.startup`` runs each command as a process of its own, in turn with a process
that imports PyTorch, Beam and TensorStore alone, and writes ``benchmarks/results/startup.json``,
with the modules that take longest to import in each (``-X importtime``). The network is the
residual U-Net as a TorchScript file. For a new job on a machine that has tried the network before,
and on one that has not, the time counts until the first chunk is begun, over importing PyTorch and
Beam alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench import PATCH, SHAPE, small_unet, write_input
from benchmarks.measure import machine, ratio_of_pairs, take_no_arguments, work_of

ROUNDS = 7
RESULTS = Path(__file__).parent / "results" / "startup.json"
LONGEST_IMPORTS = 5
IMPORTS = "import torch, apache_beam, tensorstore"
FEWER_IMPORTS = "import torch, apache_beam"


def write_job(folder: Path, name: str) -> Path:
    """Write a job file over the volume ``in`` of a folder, and its network if there is none."""
    network = folder / "network.pt"
    if not network.exists():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch means to give TorchScript up
            traced = torch.jit.trace(  # type: ignore[no-untyped-call]
                small_unet().eval(), torch.zeros(1, 1, *PATCH)
            )
            traced.save(str(network))
    values: dict[str, Any] = {
        "input": {"path": "in"},
        "output": {"path": name, "dtype": "uint8", "block_shape": [28, 84, 84]},
        "model": {
            "path": "network.pt",
            "output_channels": 3,
            "activation": "sigmoid",
            "normalize": "unit",
        },
        "inference": {
            "patch_shape": list(PATCH),
            "patch_overlap": [4, 24, 24],
            "chunk_shape": list(SHAPE),
            "device": "cpu",
        },
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps(values))
    return path


def command_of(*words: str | Path) -> list[str]:
    """The command line of a process that does one of our commands."""
    return [sys.executable, "-W", "ignore", "-m", "beam_inference", *map(str, words)]


def seconds_of(command: Sequence[str], environment: Mapping[str, str]) -> float:
    """Seconds from the start of a process to its end."""
    start = time.perf_counter()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def seconds_to_first_chunk(folder: Path, job: Path, environment: Mapping[str, str]) -> float:
    """Seconds from the start of a new job's process until its first chunk is begun."""
    output = folder / job.stem
    shutil.rmtree(output, ignore_errors=True)
    start = time.time()
    subprocess.run(command_of("run", job), env=environment, stdout=subprocess.DEVNULL, check=True)
    first, _, _ = work_of(f"file://{output}")
    return first - start


def longest_imports(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, float]:
    """The packages whose import takes longest in a command, with the seconds of all they import."""
    timed = [command[0], "-X", "importtime", *command[1:]]
    done = subprocess.run(timed, env=environment, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = {}
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and line.count("|") == 2:
            _, cumulative, name = (each.strip() for each in line.split("|"))
            if cumulative.isdigit() and "." not in name:
                seconds[name] = int(cumulative) / 1e6
    ordered = sorted(seconds.items(), key=lambda item: item[1], reverse=True)
    return {name: round(value, 3) for name, value in ordered[:LONGEST_IMPORTS]}


def ratio_in_turn(first: Callable[[], float], second: Callable[[], float]) -> dict[str, float]:
    """Ratios of seconds that two actions return, done in turn after a round that does not count."""
    pairs = [(first(), second()) for _ in range(ROUNDS + 1)]
    return ratio_of_pairs(pairs[1:])


def measure(folder: Path) -> dict[str, Any]:
    """Run everything; rows by what is started."""
    warm = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    write_input(folder, SHAPE)
    done = write_job(folder, "done")
    subprocess.run(command_of("run", done), env=warm, check=True)

    def imports(statement: str) -> Callable[[], float]:
        return partial(seconds_of, [sys.executable, "-W", "ignore", "-c", statement], warm)

    rows: dict[str, Any] = {}
    commands = {
        "`run` with nothing to do": ("run", done),
        "`status`": ("status", done),
        "`plan`": ("plan", done),
        "`verify`": ("verify", done),
    }
    for name, words in commands.items():
        command = command_of(*words)
        rows[name] = {
            **ratio_in_turn(partial(seconds_of, command, warm), imports(IMPORTS)),
            "longest imports": longest_imports(command, warm),
        }
    again = write_job(folder, "again")

    def first_chunk_untried() -> float:
        cold = {**warm, "XDG_CACHE_HOME": tempfile.mkdtemp(dir=folder)}
        return seconds_to_first_chunk(folder, again, cold)

    rows["`run` until its first chunk"] = ratio_in_turn(
        lambda: seconds_to_first_chunk(folder, again, warm), imports(FEWER_IMPORTS)
    )
    rows["`run` until its first chunk, network never tried"] = ratio_in_turn(
        first_chunk_untried, imports(FEWER_IMPORTS)
    )
    return rows


def main() -> None:
    """Measure, and write the result."""
    take_no_arguments(__doc__)
    with tempfile.TemporaryDirectory() as name:
        rows = measure(Path(name))
    print(json.dumps(rows, indent=1))
    versions = machine("torch", "apache-beam", "tensorstore")
    RESULTS.write_text(json.dumps({"machine": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
